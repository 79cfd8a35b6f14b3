"""Tests of request traces: phases and span attributes."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.observability.request_trace import AnswerTrace, RequestTrace
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.sequence import FinishReason

ENDED_S = 20.0


def make_answer(**changes: Any) -> AnswerTrace:
    times = {"arrival_s": 10.0, "first_scheduled_s": 11.0, "first_token_s": 13.0, "last_token_s": 18.0}
    counts = {"num_tokens": 4, "num_preemptions": 1, "finish_reason": FinishReason.STOP}
    return AnswerTrace(**{**times, **counts, **changes})


def make_trace(**changes: Any) -> RequestTrace:
    asked = GenerationRequest(
        prompts=[Prompt("a secret", "prompt")], sampling=Sampling(temperature=0.5, stop=["hush"]), max_tokens=9, n=2
    )
    head = {"method": "POST", "route": "/generate", "status": 200, "headers": {}, "request_id": "abc"}
    trace = {**head, "request": asked, "started_s": 9.0, "ended_s": ENDED_S, "answers": [make_answer()]}
    return RequestTrace(**{**trace, **changes})


def test_phases_are_contiguous_and_end_where_the_answer_ended() -> None:
    whole = [("queue", 10.0, 11.0), ("prefill", 11.0, 13.0), ("decode", 13.0, 18.0)]
    assert list(make_answer().phases(ENDED_S)) == whole
    without_token = make_answer(first_token_s=None, last_token_s=None)
    assert list(without_token.phases(ENDED_S)) == [("queue", 10.0, 11.0), ("prefill", 11.0, ENDED_S)]
    queued = make_answer(first_scheduled_s=None, first_token_s=None, last_token_s=None)
    assert list(queued.phases(ENDED_S)) == [("queue", 10.0, ENDED_S)]


def test_attributes_have_parameters_and_usage_but_no_prompt_and_no_stop_string() -> None:
    attributes = make_trace(num_prompt_tokens=7, num_cached_tokens=3).attributes("demo")
    assert attributes["gen_ai.request.model"] == "demo"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes["servekit.request_id"] == "abc"
    assert "gen_ai.request.top_p" not in attributes, "parameters that the client did not set are left out"
    assert not {"secret", "hush"} & set(" ".join(map(str, attributes.values())).split())


def test_a_refused_request_has_http_attributes_only() -> None:
    attributes = make_trace(status=400, request=None, answers=()).attributes("demo")
    assert [name for name in attributes if name.startswith("gen_ai")] == []
    assert "error.type" not in attributes, "a client error is not a server error"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"status": 503}, "503"),
        ({"answers": [make_answer(), make_answer(finish_reason=FinishReason.ERROR)]}, "generation"),
    ],
)
def test_server_errors_set_error_type(changes: dict[str, Any], kind: str) -> None:
    trace = make_trace(**changes)
    assert trace.is_failed
    assert trace.attributes("demo")["error.type"] == kind


def test_first_token_is_the_earliest_of_all_answers() -> None:
    assert make_trace(answers=[make_answer(first_token_s=15.0), make_answer()]).first_token_s == 13.0
    assert make_trace(answers=[make_answer(first_token_s=None)]).first_token_s is None
