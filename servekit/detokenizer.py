"""Turn token ids into text as they come: exact UTF-8, and stop strings with the least possible hold-back.

Tokens are byte strings, and a character may be split over several of them. Text is released as soon as it can no
longer change, and only then: bytes wait for their character to be complete, and characters wait only while they are
the beginning of a stop string that could still come true.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """One sequence's text. The pieces it returns, concatenated, are its whole text.

    `token_bytes` maps an id to the bytes it stands for, b"" for special tokens. Because that mapping knows no
    context, the text is the same however the tokens are grouped. Before `min_tokens` tokens no stop string counts.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = token_bytes
        self._decode = _Utf8Decoder("replace").decode
        self._stop = stop
        self._include_stop = include_stop  # whether the stop string is part of the text that it ends
        self._num_unstoppable = min_tokens - 1  # tokens to come that no stop string ends
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self.stop_string: str | None = None  # the stop string that ended the text, if one did

    def feed(self, token_id: int) -> str:
        """The text that this token makes certain. After a stop string was found there is none."""
        text = self._decode(self._token_bytes(token_id))
        if self._num_unstoppable > 0:
            self._num_unstoppable -= 1
            return text
        return self._release(text, is_last=False)

    def finish(self) -> str:
        """What was still held back; an incomplete character becomes U+FFFD."""
        return self._release(self._decode(b"", True), is_last=True)

    def _release(self, text: str, is_last: bool) -> str:
        if self.stop_string is not None:
            return ""
        text = self._held + text
        if (match := _first_match(text, self._stop)) is not None:
            start, self.stop_string = match
            self._held = ""
            return text[: start + len(self.stop_string)] if self._include_stop else text[:start]
        keep = 0 if is_last else _live_prefix_length(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _first_match(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """(start, stop string) of the match that is complete first, as if the text had come character by character."""
    matches = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    if not matches:
        return None
    _, start, string = min(matches)
    return start, string


def _live_prefix_length(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1):
        if any(string.startswith(text[-length:]) and len(string) > length for string in stop):
            return length
    return 0
