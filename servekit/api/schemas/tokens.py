"""Define the bodies of POST /tokenize and /detokenize: vLLM's wire format, and TGI's for bodies with `inputs`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from servekit.api.schemas.common_fields import TokenId, described


class TokenizeRequest(Struct, kw_only=True):
    """A text to tokenize."""

    prompt: str
    model: Annotated[str | None, described("the served model's name")] = None
    add_special_tokens: Annotated[
        bool | None, described("add the special tokens that the model expects around a text; default: true")
    ] = None
    return_token_strs: Annotated[bool | None, described("also return the text of each token")] = None


class TokenizeResponse(Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TgiTokenizeRequest(Struct, kw_only=True):
    """A text to tokenize, in TGI's format."""

    inputs: str
    add_special_tokens: bool | None = None


class TgiTokenSpan(Struct):
    """One token, and the characters of the text that it covers: [start, stop)."""

    id: int
    text: str
    start: int
    stop: int


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids to convert to text."""

    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    model: Annotated[str | None, described("the served model's name")] = None
    skip_special_tokens: Annotated[bool | None, described("leave special tokens out of the text; default: false")] = (
        None
    )


class DetokenizeResponse(Struct):
    """The text of token ids."""

    prompt: str
