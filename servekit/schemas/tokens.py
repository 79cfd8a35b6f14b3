"""POST /tokenize and /detokenize, in vLLM's wire format, and in TGI's when asked with `inputs`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from servekit.schemas.fields import TokenId, told


class TokenizeRequest(Struct, kw_only=True):
    """A text."""

    prompt: str
    model: Annotated[str | None, told("its served name")] = None
    add_special_tokens: Annotated[bool | None, told("those the model expects around a text; true by default")] = None
    return_token_strs: Annotated[bool | None, told("the tokens as texts too")] = None


class TokenizeResponse(Struct):
    """Its tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TgiTokenizeRequest(Struct, kw_only=True):
    """A text, as TGI's clients send it."""

    inputs: str
    add_special_tokens: bool | None = None


class TgiTokenSpan(Struct):
    """One token, and which characters of the text it covers."""

    id: int
    text: str
    start: int
    stop: int


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids."""

    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    model: Annotated[str | None, told("its served name")] = None
    skip_special_tokens: Annotated[bool | None, told("false by default: text and tokens then say the same")] = None


class DetokenizeResponse(Struct):
    """Their text."""

    prompt: str
