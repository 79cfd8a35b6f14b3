"""What the limit on the inputs of a request counts."""

from msgspec import Raw

from servekit.requests.inference import InferenceRequest, Tensor


def test_tensors_are_one_input_and_each_text_is_one() -> None:
    tensor = Tensor("a", [2], "INT64", Raw(b"[1, 2]"))
    assert InferenceRequest(tensors=[tensor, tensor]).num_inputs == 1
    assert InferenceRequest(texts=["a", "b", "c"]).num_inputs == 3
