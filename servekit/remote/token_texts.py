"""Number the tokens of a remote model whose texts its server has sent, in logprobs.

The ids of the model's tokenizer are not known. Each text gets a number here, so that logprobs go through the same code
as those of local models. The number is negative, so it cannot be an id of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NoReturn

from servekit.engine.tokenizer import Tokenizer
from servekit.errors import InvalidRequest, RemoteFailed

UNKNOWN_TOKEN_ID = -1  # of a piece of text, which may have several tokens
MAX_TOKENS = 2**19  # distinct ones; the largest vocabularies have half as many
MAX_TOKEN_BYTES = 2**10


class TokenTexts(Tokenizer):
    """Takes the place of the tokenizer of a remote model. Operations that need a real tokenizer are refused."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._ids: dict[bytes, int] = {}
        self._texts: list[bytes] = [b""]  # of -1, -2 and so on
        self.token_bytes_with_special = lru_cache(maxsize=1)(self._text_of)

    def id_of(self, text: bytes) -> int:
        """Return the number of a token's text. Raises RemoteFailed for more than a vocabulary may have."""
        known = self._ids.get(text)
        if known is not None:
            return known
        if len(self._texts) >= MAX_TOKENS or len(text) > MAX_TOKEN_BYTES:
            raise RemoteFailed("the model's server sent more or longer tokens than a vocabulary has")
        self._texts.append(text)
        number = self._ids[text] = -len(self._texts)
        return number

    def decode(self, token_ids: Iterable[int], *_: Any, **__: Any) -> str:
        return b"".join(map(self._text_of, token_ids)).decode("utf-8", "replace")

    def _text_of(self, token_id: int) -> bytes:
        if not -len(self._texts) <= token_id < 0:
            raise refusal(self._model)
        return self._texts[-token_id - 1]

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
