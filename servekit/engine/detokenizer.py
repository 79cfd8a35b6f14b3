"""Turn token ids into text as they arrive, with exact UTF-8, and stop strings with minimal hold-back.

Tokens are byte strings, and a character may be split over several of them. Text is released as soon as it can no longer
change: bytes wait until their character is complete, and characters wait only while they are the beginning of a stop
string that can still follow.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable

from servekit.parsing.text_reader import first_match, live_prefix_length


class Detokenizer:
    """The text of one sequence. The returned pieces, concatenated, are the whole text.

    `token_bytes` maps a token id to its bytes, b"" for special tokens. The mapping does not depend on context, so the
    text does not depend on how tokens are grouped. Stop strings are ignored within the first `min_tokens` tokens.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = token_bytes
        self._incomplete = b""  # the first bytes of a character
        self._stop = stop
        self._include_stop = include_stop  # whether the text includes the stop string that ends it
        self._num_unstoppable = min_tokens - 1  # further tokens within which stop strings are ignored
        self._held = ""  # decoded text that may be the beginning of a stop string
        self.stop_string: str | None = None  # the one that ended the text; None if none did

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; "" after a stop string."""
        following = self._token_bytes(token_id)
        is_whole = following.isascii() and not self._incomplete
        text = following.decode() if is_whole else self._decode(following)
        if not self._stop:
            return text  # for most sequences, this is all
        if self._num_unstoppable > 0:
            self._num_unstoppable -= 1
            return text
        return self._release(text, is_last=False)

    def finish(self) -> str:
        """Return the text that is still held back. An incomplete character becomes U+FFFD."""
        return self._release(self._decode(b"", is_last=True), is_last=True)

    def text_of(self, token_id: int, is_in_text: bool, is_last: bool) -> str:
        """Return the text that a token completes. With the last token, also what is still held back.

        `is_in_text`: whether the token is part of the text. The one that stops a sequence may not be.
        """
        text = self.feed(token_id) if is_in_text else ""
        if is_last and self.stop_string is None:
            text += self.finish()
        return text

    def _decode(self, following: bytes, is_last: bool = False) -> str:
        """Return the characters that are complete with these bytes."""
        waiting = self._incomplete + following
        text, num_used = utf_8_decode(waiting, "replace", is_last)
        self._incomplete = waiting[num_used:]
        return text

    def _release(self, text: str, is_last: bool) -> str:
        if self.stop_string is not None:
            return ""
        text = self._held + text
        if (match := first_match(text, self._stop)) is not None:
            start, self.stop_string = match
            self._held = ""
            return text[: start + len(self.stop_string)] if self._include_stop else text[:start]
        keep = 0 if is_last else live_prefix_length(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class NullDetokenizer(Detokenizer):
    """Gives no text: another process makes it."""

    def __init__(self) -> None:
        super().__init__(lambda _: b"")

    def feed(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
