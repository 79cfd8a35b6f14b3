"""Define the messages between a predictor's engine and its worker: embeddings, reranking, classification.

A predictor computes each item once and completely; nothing is generated. Like the messages of generation, these are
frozen values, msgpack on the wire, never pickled.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from servekit.protocol.frames import Bytes

MIN_PADDING = 8  # tokens
MAX_PIXELS = 2**30  # of an image; the limit is a setting, which is not larger


class PredictorKind(StrEnum):
    """What a predictor computes of an item."""

    EMBED = "embed"  # a vector, of a text
    RERANK = "rerank"  # a score, of a query with a document
    CLASSIFY = "classify"  # a number for each label, of a text or an image


class Modality(StrEnum):
    """What an item is."""

    TEXT = "text"
    IMAGE = "image"


class Activation(StrEnum):
    """How the numbers that the model computes become scores."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


def padded_length(length: int) -> int:
    """Return the tokens that a worker computes for an item of this length, at most: up to an eighth more, or seven.

    Items of one padded length are computed together as a rectangle. The steps grow with the length, so that there are
    few different ones: 8, 16, … 128, 144, … 256, 288, …
    """
    step = max(MIN_PADDING, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


class LoadPredictor(Struct, frozen=True, tag="load_predictor"):
    """The first message to a predictor's worker: load this model."""

    model_path: str
    kind: PredictorKind
    dtype: str
    device: str
    max_model_len: int | None  # in tokens; None takes the model's own
    max_image_pixels: int
    fingerprint: str = ""


class PredictorInfo(Struct, frozen=True):
    """What the engine needs to know of a predictor. The worker reads it from the loaded model."""

    kind: PredictorKind
    modality: Modality
    architecture: str
    num_parameters: int
    vocab_size: int  # 0 for a model of images
    max_model_len: int  # tokens of an item, its special tokens included
    dimensions: int = 0  # of an embedding
    labels: tuple[str, ...] = ()
    activation: Activation = Activation.NONE
    prompts: dict[str, str] = {}  # texts that are put before inputs, by name
    default_prompt: str | None = None  # its name
    lowercases: bool = False  # texts become lower case before they are tokenized
    pools_prompts: bool = True  # whether a prompt's tokens count for the embedding
    item_tokens: int = 1  # that an image counts for in a batch
    fingerprint: str = ""


class PredictorReady(Struct, frozen=True, tag="predictor_ready"):
    """The answer to LoadPredictor: the model is loaded."""

    model: PredictorInfo
    device: str
    dtype: str
    load_time_s: float
    num_weight_bytes: int
    memory_bytes: int = 0  # that this process holds on its device; 0 if it is not known


class TextItem(Struct, frozen=True, tag="text", array_like=True, gc=False):
    """A text or a pair of texts, as token ids with all special tokens."""

    token_ids: tuple[int, ...]
    num_first: int = 0  # tokens of token type 0, if the others have type 1; 0: all have type 0
    num_unpooled: int = 0  # first tokens that pooling leaves out: those of a prompt
    dimensions: int | None = None  # that are kept of the embedding


class ImageItem(Struct, frozen=True, tag="image", array_like=True, gc=False):
    """An image file, as the client sent it. The worker decodes it."""

    is_base64: bool
    data: memoryview
    num_pixels: int = MAX_PIXELS  # it was batched as an image of so many; the worker refuses one that has more


class PredictBatch(Struct, frozen=True, tag="predict_batch"):
    """Items to compute together. All are of the model's modality."""

    epoch: int
    batch_id: int
    items: tuple[TextItem | ImageItem, ...]


_encode = msgspec.msgpack.Encoder().encode
MIN_PART_BYTES = 2**16


def encode_batch(batch: PredictBatch) -> list[Bytes]:
    """Return a batch as msgpack, in parts: its large images are parts of their own, because they are not copied.

    To encode an image of 8 MB would hold the event loop for some milliseconds.
    """
    if not any(isinstance(item, ImageItem) and len(item.data) >= MIN_PART_BYTES for item in batch.items):
        return [_encode(batch)]
    head = _encode(replace(batch, items=()))
    assert head.endswith(b"\x90"), "the items, of which there are none, come last"
    parts: list[Bytes] = [head[:-1], b"\xdd" + len(batch.items).to_bytes(4, "big")]  # msgpack's array of any length
    for item in batch.items:
        if isinstance(item, ImageItem) and len(item.data) >= MIN_PART_BYTES:
            end = _encode(item.num_pixels)
            begin = _encode(replace(item, data=memoryview(b""))).removesuffix(end)
            assert begin.endswith(b"\xc4\x00"), "the data, of which there are none, come before the pixels"
            parts += [begin[:-2], b"\xc6" + len(item.data).to_bytes(4, "big"), item.data, end]  # bytes of any length
        else:
            parts.append(_encode(item))
    return parts


class ItemFailure(Struct, frozen=True, array_like=True):
    """Why an item has no result: an image that cannot be decoded."""

    index: int  # of the item in its batch
    message: Annotated[str, Meta(max_length=500)]
    is_client_error: bool


class BatchResult(Struct, frozen=True, tag="batch_result"):
    """What a batch computed: numbers for each item, in the batch's order."""

    epoch: int
    batch_id: int
    values: bytes  # float32 in the machine's order, item after item
    counts: tuple[int, ...]  # of each item's numbers; 0 for one that failed
    step_time_s: float
    num_computed_tokens: int  # with padding
    failures: tuple[ItemFailure, ...] = ()
