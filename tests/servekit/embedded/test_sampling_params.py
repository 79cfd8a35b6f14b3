from typing import Any

import pytest

from servekit import SamplingParams
from servekit.errors import InvalidRequest
from servekit.requests.generation import GrammarKind, Prompt

PROMPT = Prompt("a text", "prompt")


def test_the_fields_are_those_of_the_native_api() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=50, stop=["\n"], seed=7, n=2, logit_bias={5: 1.5})
    request = params.answering([PROMPT])
    sampling = request.sampling
    assert (request.max_tokens, request.n, request.best_of, request.prompts) == (50, 2, 2, [PROMPT])
    assert (sampling.temperature, sampling.top_p, sampling.stop, sampling.seed) == (0.8, 0.95, ["\n"], 7)
    assert sampling.logit_bias == {5: 1.5}


def test_a_tuple_is_as_good_as_a_list() -> None:
    assert SamplingParams(stop=("a", "b")).answering([PROMPT]).sampling.stop == ["a", "b"]  # type: ignore[arg-type]


def test_a_schema_is_a_dictionary() -> None:
    grammar = SamplingParams(grammar={"type": "json_schema", "value": {"type": "integer"}}).answering([PROMPT]).grammar  # type: ignore[arg-type]
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_SCHEMA, '{"type":"integer"}')


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature = -1: expected float >= 0.0"),
        ({"max_tokens": "many"}, "max_tokens = 'many'"),
        ({"n": 3, "best_of": 2}, "best_of = 2 is less than n = 3"),
        ({"grammar": {"type": "regex"}}, "grammar.value: type 'regex' needs a string"),
        ({"stop": [object()]}, "sampling_params: "),
    ],
)
def test_a_wrong_value_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**fields)
    assert message in raised.value.message


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_they_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams(seed=1).seed = 2
