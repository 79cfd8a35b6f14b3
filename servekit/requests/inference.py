"""A request for tensors, which models of kind `triton` compute on another server. Their numbers are not decoded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import Raw, Struct

INFER = "infer"  # the kind of models that compute tensors


class Tensor(Struct):
    """A tensor in the format of KServe's protocol V2."""

    name: str
    shape: list[int]
    datatype: str  # such as FP32, INT64, BOOL, BYTES
    data: Raw  # JSON: a list of the values in row-major order, flat or nested


# Decodes a large answer of the model's server in another process. Raises RemoteFailed if it is not valid.
DecodeOutputs = Callable[[bytearray], Awaitable[list[Tensor]]]


class InferenceRequest(Struct, frozen=True, kw_only=True):
    """The inputs of one inference: either tensors, or texts for a model whose only input is text."""

    tensors: list[Tensor] = []
    texts: list[str] = []
    output_names: list[str] = []  # empty: all outputs
    deadline_ms: int | None = None

    @property
    def num_inputs(self) -> int:
        """What counts for the limit on the inputs of a request."""
        return len(self.texts) or 1
