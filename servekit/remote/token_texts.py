"""Number the tokens of a remote model whose texts its server has sent, in logprobs.

The ids of the model's tokenizer are not known. Each text gets a number here, so that logprobs go through the same code
as those of local models. The number is negative, so it cannot be an id of the model.

A text that was not named for long is forgotten, because a server may name more texts than a vocabulary has: some name
texts of several tokens. Its number is not used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NoReturn

from servekit.engine.tokenizer import Tokenizer
from servekit.errors import InvalidRequest, RemoteFailed

UNKNOWN_TOKEN_ID = -1  # of a piece of text, which may have several tokens
MAX_TOKENS = 2**19  # distinct ones that are remembered; the largest vocabularies have half as many
MAX_BYTES = 2**25  # of their texts; those of the largest vocabularies have a tenth
MAX_TOKEN_BYTES = 2**10


class TokenTexts(Tokenizer):
    """Takes the place of the tokenizer of a remote model. Operations that need a real tokenizer are refused."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._ids: OrderedDict[bytes, int] = OrderedDict()  # the one that was named last is the last
        self._texts: dict[int, bytes] = {UNKNOWN_TOKEN_ID: b""}  # of these numbers
        self._num_bytes = 0
        self._next_id = UNKNOWN_TOKEN_ID - 1
        self.token_bytes_with_special = lru_cache(maxsize=1)(self._text_of)

    def id_of(self, text: bytes) -> int:
        """Return the number of a token's text. Raises RemoteFailed for a longer one than a vocabulary has."""
        known = self._ids.get(text)
        if known is not None:
            self._ids.move_to_end(text)
            return known
        if len(text) > MAX_TOKEN_BYTES:
            raise RemoteFailed(f"the model's server sent a token of {len(text)} bytes; the limit is {MAX_TOKEN_BYTES}")
        number, self._next_id = self._next_id, self._next_id - 1
        self._ids[text], self._texts[number] = number, text
        self._num_bytes += len(text)
        while len(self._ids) > MAX_TOKENS or self._num_bytes > MAX_BYTES:
            forgotten, its_number = self._ids.popitem(last=False)
            del self._texts[its_number]
            self._num_bytes -= len(forgotten)
        return number

    def decode(self, token_ids: Iterable[int], *_: Any, **__: Any) -> str:
        return b"".join(map(self._text_of, token_ids)).decode("utf-8", "replace")

    def _text_of(self, token_id: int) -> bytes:
        text = self._texts.get(token_id)
        if text is None:
            raise refusal(self._model)
        return text

    def check_queue(self, *_: Any, **__: Any) -> NoReturn:
        raise refusal(self._model)

    token_bytes_of = check_queue

    def is_special(self, token_id: int) -> bool:
        return False


def refusal(model: str) -> InvalidRequest:
    """Return the error for what needs the tokenizer of a remote model."""
    return InvalidRequest(
        f"the model {model!r} runs on another server, and its tokenizer is not known here; ask that server",
        code="not_supported",
    )
