"""Bodies of KServe's protocol V2."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from servekit.errors import InvalidRequest, RemoteFailed
from servekit.remote.kserve_format import ModelInfo, TensorInfo, read_answer, read_model_info, write_request
from servekit.requests.inference import InferenceRequest, Tensor


def info(*inputs: TensorInfo) -> ModelInfo:
    return ModelInfo("there", list(inputs), [])


def test_numbers_are_sent_as_the_client_wrote_them() -> None:
    data = b"[[1.50, -0.0], [1e-3, 2]]"
    request = InferenceRequest(tensors=[Tensor("A", [2, 2], "FP32", Raw(data))], output_names=["SUM"])
    body = b"".join(write_request(request, info(), "here"))
    assert data in body
    assert json.loads(body)["outputs"] == [{"name": "SUM"}]
    assert json.loads(body)["inputs"][0]["shape"] == [2, 2]


@pytest.mark.parametrize(("known", "sent"), [([-1], [2]), ([-1, 1], [2, 1])])
def test_texts_are_the_only_input_of_a_model_that_takes_text(known: list[int], sent: list[int]) -> None:
    request = InferenceRequest(texts=["blüe", "x"])
    body = json.loads(b"".join(write_request(request, info(TensorInfo("TEXT", "BYTES", known)), "here")))
    assert body == {"inputs": [{"name": "TEXT", "shape": sent, "datatype": "BYTES", "data": ["blüe", "x"]}]}


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [TensorInfo("A", "FP32", [-1])],
        [TensorInfo("A", "BYTES", [-1]), TensorInfo("B", "BYTES", [-1])],
        [TensorInfo("A", "BYTES", [-1, 2, 3])],
    ],
)
def test_text_for_other_models_is_refused_with_the_inputs_that_there_are(inputs: list[TensorInfo]) -> None:
    with pytest.raises(InvalidRequest, match="'here' does not take one text; send its inputs as tensors: ") as caught:
        write_request(InferenceRequest(texts=["x"]), info(*inputs), "here")
    assert all(each.name in caught.value.message for each in inputs)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="input cannot be sent"):
        write_request(InferenceRequest(texts=["\ud800"]), info(TensorInfo("A", "BYTES", [-1])), "here")
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        write_request(InferenceRequest(tensors=[Tensor("\ud800", [1], "FP32", Raw(b"[1]"))]), info(), "here")


def test_outputs_keep_the_numbers_of_the_server() -> None:
    body = b'{"model_name":"m","outputs":[{"name":"P","datatype":"FP32","shape":[1,2],"data":[0.10,1e-9]}]}'
    (output,) = read_answer(body)
    assert (output.name, output.shape, output.datatype, bytes(output.data)) == ("P", [1, 2], "FP32", b"[0.10,1e-9]")


def test_information_of_a_model() -> None:
    told: Any = {"name": "m", "versions": ["1"], "platform": "onnx", "inputs": [], "outputs": [], "other": 1}
    assert read_model_info(json.dumps(told).encode()) == ModelInfo("m", [], [], ["1"], "onnx")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"oh no",
        b"[]",
        b'{"outputs": 1}',
        b'{"outputs": [{"name": "P", "datatype": "FP32", "shape": [1]}]}',  # it has binary data, or none
        b'{"outputs": [{"name": "\xff"}]}',
    ],
)
def test_invalid_answer_is_the_servers_mistake(body: bytes) -> None:
    with pytest.raises(RemoteFailed, match="the model's server sent an invalid answer: "):
        read_answer(body)
