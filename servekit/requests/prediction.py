"""A request for predictions, in one form for all HTTP APIs: embeddings, scores of pairs, labels of texts or images."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class ImageInput(Struct, frozen=True):
    """An image file as the client sent it. Nothing of it is decoded here."""

    data: memoryview  # of the request's body, so that an image of 8 MB is not copied
    is_base64: bool  # base64 text, or a data URL


# A text; a pair of texts; a text as token ids, with all special tokens, as a list or an array; an image file.
Input = str | tuple[str, str] | Sequence[int] | ImageInput


class PredictionRequest(Struct, frozen=True, kw_only=True):
    """Inputs, and what to compute of each."""

    inputs: list[Input]  # all of one of these types, and at least one
    param: str  # the name of the field with the inputs in the client's request, for errors
    dimensions: int | None = None  # that are kept of an embedding
    prompt_name: str | None = None  # of the checkpoint's prompts; None: its default one
    truncates: bool = False  # cut inputs that are too long, in place of refusing them
    max_tokens: int | None = None  # to which inputs are cut; None: the model's limit
    raw_scores: bool = False  # the model's own numbers are wanted, without its activation
    priority: int = 0
    deadline_ms: int | None = None
