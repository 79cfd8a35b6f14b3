"""Claims about which requests a process remembers, for whom, and for how long."""

from __future__ import annotations

import pytest

from servekit.api import explanations as explanations_module
from servekit.api.explanations import MAX_ENDED, Explanations, explain_so_far
from servekit.engine.caller import Caller
from servekit.engine.client_queue import ClientQueue
from servekit.engine.detokenizer import NullDetokenizer
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import RequestNotFound
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.requests.time_causes import RequestTimes
from servekit.scheduler.sequence_history import ManagerLog, SequenceHistory
from tests.support.scheduler import make_sequence


def make_state(tenant: str, request_id: str, is_timed: bool = True) -> RequestState:
    times = RequestTimes(lambda: 5.0, 1.0) if is_timed else None
    request = GenerationRequest(prompts=[Prompt("x", "prompt")], sampling=Sampling(), times=times)
    queue = ClientQueue()
    output = SequenceOutput(make_sequence(0), 0, NullDetokenizer(), queue, request_id)
    return RequestState(request, Caller(tenant, request_id), [output], queue, 1, lambda _: None)


def test_a_request_is_explained_while_it_runs_and_after_its_end_to_its_tenant_only() -> None:
    explanations, state = Explanations(), make_state("a", "one")
    explanations.begin(state)
    running = explanations.find("a", "one")
    assert not running.is_finished and running.wall_time_s == 4.0
    explanations.end(state, 3.0)
    ended = explanations.find("a", "one")
    assert ended.is_finished and ended.wall_time_s == 2.0
    for tenant, request_id in (("b", "one"), ("a", "two")):
        with pytest.raises(RequestNotFound, match=request_id):
            explanations.find(tenant, request_id)


def test_the_answer_that_ended_last_explains_the_request() -> None:
    state = make_state("", "several")
    first = state.outputs[0]
    second = SequenceOutput(make_sequence(1), 1, NullDetokenizer(), state.queue)
    state.outputs.append(second)
    for ends_s, expected in (((5.0, 3.0), 0), ((5.0, None), 1), ((2.0, 3.0), 1)):
        first.ended_s, second.ended_s = ends_s
        found = explain_so_far(state)
        assert found is not None and found.sequence_id == expected


def test_a_request_that_nobody_holds_any_more_is_forgotten() -> None:
    explanations, state = Explanations(), make_state("", "lost")
    explanations.begin(state)
    del state
    with pytest.raises(RequestNotFound):
        explanations.find("", "lost")


def test_the_newest_of_two_requests_with_one_id_is_explained() -> None:
    explanations, old, new = Explanations(), make_state("", "twin"), make_state("", "twin")
    explanations.begin(old)
    explanations.begin(new)
    explanations.end(old, 2.0)
    assert not explanations.find("", "twin").is_finished
    explanations.end(new, 4.0)
    assert explanations.find("", "twin").wall_time_s == 3.0


def test_only_the_last_requests_are_remembered() -> None:
    explanations = Explanations()
    for number in range(MAX_ENDED + 1):
        explanations.end(make_state("", str(number)), 2.0)
    explanations.find("", "1")
    with pytest.raises(RequestNotFound):
        explanations.find("", "0")


def test_long_histories_of_one_tenant_do_not_displace_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations_module, "MAX_ENDED_SPANS", 4)
    explanations, short = Explanations(), make_state("short", "first")
    explanations.end(short, 2.0)
    for number in range(4):
        state = make_state("long", str(number))
        log = ManagerLog()
        state.outputs[0].sequence.history = history = SequenceHistory(0.0, log)
        log.now_s = 1.0
        history.admitted()
        log.now_s = 2.0
        history.queued()
        assert history.num_spans == 2
        explanations.end(state, 2.0)
    explanations.end(make_state("long", "3"), 2.0)  # replaces one with two spans
    for tenant, request_id in (("short", "first"), ("long", "2"), ("long", "3")):
        assert explanations.find(tenant, request_id).is_finished
    with pytest.raises(RequestNotFound):
        explanations.find("long", "1")


def test_a_line_of_a_batch_has_no_times_and_no_explanation() -> None:
    explanations, state = Explanations(), make_state("", "line", is_timed=False)
    assert explain_so_far(state) is None
    explanations.begin(state)
    explanations.end(state, 2.0)
    with pytest.raises(RequestNotFound):
        explanations.find("", "line")
