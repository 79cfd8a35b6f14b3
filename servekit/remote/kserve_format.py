"""Write and read bodies of KServe's protocol V2 (the Open Inference Protocol), as Triton speaks it. This is pure.

Tensors are JSON, which every server of the protocol accepts. Their numbers are passed on as the client or the server
wrote them, without decoding.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from servekit.errors import InvalidRequest, RemoteFailed
from servekit.protocol.frames import Bytes
from servekit.requests.inference import InferenceRequest, Tensor

TEXT = "BYTES"  # the datatype of texts
MAX_NAMES_SHOWN = 20
MARK = Raw(b"\0")  # stands for the numbers of a tensor; JSON cannot contain it: in texts it is escaped


class TensorInfo(Struct):
    """An input or an output of a model. A dimension of -1 may have any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelInfo(Struct):
    """The server's description of a model."""

    name: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    versions: list[str] = []
    platform: str = ""


class _Answer(Struct):
    outputs: list[Tensor]


def read_model_info(body: bytes | bytearray) -> ModelInfo:
    """Return the server's description of a model. Raises RemoteFailed."""
    info: ModelInfo = _read(body, ModelInfo)
    return info


def write_request(request: InferenceRequest, info: ModelInfo, model: str) -> list[Bytes]:
    """Return the body of a request in parts: the numbers of tensors are not copied. Raises InvalidRequest.

    `model` is the model's name here.
    """
    tensors = request.tensors or [_texts(request.texts, info, model)]
    body: dict[str, Any] = {"inputs": [replace(each, data=MARK) for each in tensors]}
    if request.output_names:
        body["outputs"] = [{"name": name} for name in request.output_names]
    try:
        first, *others = msgspec.json.encode(body).split(bytes(MARK))
        parts: list[Bytes] = [first]
        for tensor, other in zip(tensors, others, strict=True):
            parts += [memoryview(tensor.data), other]
        return parts
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the request cannot be sent to the model's server: {str(error)[:200]}") from None


def _texts(texts: list[str], info: ModelInfo, model: str) -> Tensor:
    """Return the only input of a model that takes text. Raises InvalidRequest."""
    inputs = ", ".join(f"{each.name} ({each.datatype} {each.shape})" for each in info.inputs[:MAX_NAMES_SHOWN])
    if len(info.inputs) != 1 or info.inputs[0].datatype != TEXT or len(info.inputs[0].shape) not in (1, 2):
        raise InvalidRequest(
            f"the model {model!r} does not take one text; send its inputs as tensors: {inputs}", param="input"
        )
    (only,) = info.inputs
    shape = [len(texts)] if len(only.shape) == 1 else [len(texts), 1]
    try:
        return Tensor(only.name, shape, TEXT, Raw(msgspec.json.encode(texts)))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"input cannot be sent to the model's server: {str(error)[:200]}", param="input") from None


def read_answer(body: bytes | bytearray) -> list[Tensor]:
    """Return the outputs of a model. Raises RemoteFailed."""
    answer: _Answer = _read(body, _Answer)
    return answer.outputs


def _read(body: bytes | bytearray, kind: type[Any]) -> Any:
    try:
        body.decode()  # msgspec does not check the UTF-8 of values that it leaves raw
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteFailed(f"the model's server sent an invalid answer: {str(error)[:200]}") from None
