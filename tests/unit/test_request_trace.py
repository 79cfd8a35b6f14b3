"""Claims about what a trace tells."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.generation_request import GenerationRequest, Prompt, Sampling
from servekit.request_trace import AnswerTrace, RequestTrace
from servekit.sequence import FinishReason

ENDED_S = 20.0


def make_answer(**changes: Any) -> AnswerTrace:
    told = {"arrival_s": 10.0, "first_scheduled_s": 11.0, "first_token_s": 13.0, "last_token_s": 18.0}
    counts = {"num_tokens": 4, "num_preemptions": 1, "finish_reason": FinishReason.STOP}
    return AnswerTrace(**{**told, **counts, **changes})


def make_trace(**changes: Any) -> RequestTrace:
    asked = GenerationRequest(
        prompts=[Prompt("a secret", "prompt")], sampling=Sampling(temperature=0.5, stop=["hush"]), max_tokens=9, n=2
    )
    told = {"method": "POST", "route": "/generate", "status": 200, "headers": {}, "request_id": "abc", "request": asked}
    return RequestTrace(**{**told, "started_s": 9.0, "ended_s": ENDED_S, "answers": [make_answer()], **changes})


def test_phases_follow_each_other_as_far_as_they_came() -> None:
    whole = [("queue", 10.0, 11.0), ("prefill", 11.0, 13.0), ("decode", 13.0, 18.0)]
    assert list(make_answer().phases(ENDED_S)) == whole
    without_token = make_answer(first_token_s=None, last_token_s=None)
    assert list(without_token.phases(ENDED_S)) == [("queue", 10.0, 11.0), ("prefill", 11.0, ENDED_S)]
    in_line = make_answer(first_scheduled_s=None, first_token_s=None, last_token_s=None)
    assert list(in_line.phases(ENDED_S)) == [("queue", 10.0, ENDED_S)]


def test_a_trace_tells_what_was_asked_and_what_it_cost_but_not_what_was_said() -> None:
    told = make_trace(num_prompt_tokens=7, num_cached_tokens=3).attributes("demo")
    assert told["gen_ai.request.model"] == "demo"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.max_tokens"] == 9
    assert told["gen_ai.request.choice.count"] == 2
    assert told["gen_ai.usage.input_tokens"] == 7
    assert told["gen_ai.usage.cache_read.input_tokens"] == 3
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["servekit.request_id"] == "abc"
    assert "gen_ai.request.top_p" not in told, "what was left open is not told"
    assert not {"secret", "hush"} & set(" ".join(map(str, told.values())).split())


def test_a_refusal_is_an_http_request_and_nothing_more() -> None:
    told = make_trace(status=400, request=None, answers=()).attributes("demo")
    assert [name for name in told if name.startswith("gen_ai")] == []
    assert "error.type" not in told, "the caller's mistake is not ours"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"status": 503}, "503"),
        ({"answers": [make_answer(), make_answer(finish_reason=FinishReason.ERROR)]}, "generation"),
    ],
)
def test_what_the_server_failed_is_an_error(changes: dict[str, Any], kind: str) -> None:
    trace = make_trace(**changes)
    assert trace.is_failed
    assert trace.attributes("demo")["error.type"] == kind


def test_the_first_token_is_the_earliest_of_all_answers() -> None:
    assert make_trace(answers=[make_answer(first_token_s=15.0), make_answer()]).first_token_s == 13.0
    assert make_trace(answers=[make_answer(first_token_s=None)]).first_token_s is None
