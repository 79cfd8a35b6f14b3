"""Claims about request bodies: strict, bounded, and every refusal names its field."""

import pytest

from servekit.errors import InvalidRequest
from servekit.generation_request import GenerationRequest
from servekit.schemas.decoding import decode
from servekit.schemas.native import GenerateRequest


def read(body: bytes) -> GenerationRequest:
    return decode(body, GenerateRequest).read()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"prompt": NaN}', "invalid_json", None),
        (b"[" * 100_000, "invalid_value", None),
        (b'{"logit_bias": {"1": 1}, "seed": 1e400, "prompt": "a"}', "invalid_value", "seed"),
        (b'{"prompt": "\xff"}', "invalid_json", None),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_value", "prompt"),
        (b'{"x": ' + b"[" * 100_000, "unknown_field", "x"),
        (b"[]", "invalid_value", None),
        (b"{}", "invalid_value", "prompt"),
        (b'{"prompt": "a", "prompts": ["b"]}', "invalid_value", "prompt"),
        (b'{"prompt": 3}', "invalid_value", "prompt"),
        (b'{"prompts": []}', "invalid_value", "prompts"),
        (b'{"prompts": ["a", 1]}', "invalid_value", "prompts[1]"),
        (b'{"prompt": "a", "temprature": 1}', "unknown_field", "temprature"),
        (b'{"prompt": "a", "temperature": "hot"}', "invalid_value", "temperature"),
        (b'{"prompt": "a", "temperature": -0.1}', "invalid_value", "temperature"),
        (b'{"prompt": "a", "temperature": 1e400}', "invalid_value", "temperature"),
        (b'{"prompt": "a", "max_tokens": 0}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 99999999999999999999999}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": true}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "top_p": 0}', "invalid_value", "top_p"),
        (b'{"prompt": "a", "top_p": 1.01}', "invalid_value", "top_p"),
        (b'{"prompt": "a", "top_k": -2}', "invalid_value", "top_k"),
        (b'{"prompt": "a", "seed": 9223372036854775808}', "invalid_value", "seed"),
        (b'{"prompt": "a", "stop": ""}', "invalid_value", "stop"),
        (b'{"prompt": "a", "stop": [1]}', "invalid_value", "stop[0]"),
        (b'{"prompt": "a", "stop": ' + str(["x"] * 17).replace("'", '"').encode() + b"}", "invalid_value", "stop"),
        (b'{"prompt": "a", "ignore_eos": 1}', "invalid_value", "ignore_eos"),
    ],
)
def test_bad_body_is_refused_by_field(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(body)
    assert (refusal.value.answer_code, refusal.value.param) == (code, param)
    assert refusal.value.status == 400


def test_texts_are_called_what_the_client_calls_them() -> None:
    one, many = read(b'{"prompt": "a", "n": 3}'), read(b'{"prompts": ["a", "b"]}')
    assert [(prompt.content, prompt.param) for prompt in one.prompts] == [("a", "prompt")]
    assert [(prompt.content, prompt.param) for prompt in many.prompts] == [("a", "prompts[0]"), ("b", "prompts[1]")]
    assert (one.num_sequences, many.num_sequences) == (3, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "a", "priority": 2000}', "priority = 2000: expected int <= 1000"),
        (b'{"prompt": "a", "ttft_ms": "soon"}', "ttft_ms = 'soon': expected int, got str"),
        (b'{"prompt": "a", "seed": "' + b"x" * 100 + b'"}', "seed: expected int, got str"),
        (b'{"prompts": ["a", 1]}', "prompts[1]: expected str, got int"),
        (b"[]", "the body: expected object, got array"),
    ],
)
def test_an_error_tells_the_value_and_what_is_expected(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.message == message
