"""Tests of grammars in a running server: slow ones are refused, and delay no other request."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from tests.support import proc
from tests.support.server_process import ServerProcess, events
from tests.support.timing import again_if_late, assert_on_time, assert_within

Json = dict[str, Any]
numbers = itertools.count(1)  # each once, because the server remembers grammars


def slow(number: int) -> Json:
    """Two seconds to compile, and 160 MB, for less than a hundred bytes. The server remembers what it refused.

    The divisor always ends in 9: it shares no factor with 10. 400,000, for example, compiles at once.
    """
    return {"type": "json_schema", "value": {"type": "integer", "multipleOf": 399_989 + 10 * number}}


def generate(server: ServerProcess, timeout_s: float = 120, **fields: Any) -> httpx2.Response:
    with httpx2.Client(base_url=server.url, timeout=timeout_s) as client:
        return client.post("/generate", json={"prompt": "a", "max_tokens": 8, **fields})


@again_if_late
def test_a_grammar_that_compiles_slowly_is_refused_and_delays_no_stream(server: ServerProcess) -> None:
    times: list[float] = []
    is_enough = threading.Event()

    def read() -> None:
        body = {"prompt": "Tell me a story.", "max_tokens": 1900, "ignore_eos": True}
        with httpx2.stream("POST", f"{server.url}/generate_stream", json=body, timeout=60) as response:
            for _ in response.iter_lines():
                times.append(time.monotonic())
                if is_enough.is_set():
                    return

    (worker,) = server.worker_pids()
    before = proc.resident_mib(worker)
    reader = threading.Thread(target=read)
    reader.start()
    refusal = generate(server, grammar=slow(next(numbers)))
    is_enough.set()
    reader.join()
    assert_on_time("too busy" not in refusal.text, "it had a thirtieth of a core")
    error = refusal.json()["error"]
    assert (refusal.status_code, error["param"]) == (400, "grammar")
    assert "make it simpler" in error["message"]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert proc.resident_mib(worker) - before < 50
    assert_within(1.2, max(gaps), "compiled in the worker it takes two seconds")


@again_if_late
def test_clients_that_disconnect_during_compilation_delay_no_other_request(server: ServerProcess) -> None:
    started = time.monotonic()
    for _ in range(4):
        with pytest.raises(httpx2.TimeoutException):
            generate(server, timeout_s=0.2, grammar=slow(next(numbers)))
    answer = generate(server, grammar={"type": "regex", "value": f"a{{{next(numbers)}}}"}, max_tokens=1)
    assert answer.status_code == 200
    assert_within(6, time.monotonic() - started, "each would take two seconds if it were compiled to the end")


@again_if_late
def test_a_deadline_includes_the_compilation_of_the_grammar(server: ServerProcess) -> None:
    started = time.monotonic()
    refusal = generate(server, grammar=slow(next(numbers)), deadline_ms=300)
    elapsed_s = time.monotonic() - started
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert_within(1.5, elapsed_s)


def test_an_answer_ends_where_its_grammar_ends_with_any_other_parameters(server: ServerProcess) -> None:
    grammar = {"type": "choice", "value": ["red"]}
    for fields in ({}, {"ignore_eos": True}, {"min_tokens": 8}, {"n": 3, "temperature": 2}):
        answer = generate(server, grammar=grammar, skip_special_tokens=False, **fields).json()
        texts = answer.get("generated_texts", [answer.get("generated_text")])
        assert set(texts) == {"red"}


def test_a_grammar_that_is_too_complex_to_follow_fails_only_its_own_request(server: ServerProcess) -> None:
    ambiguous = {"type": "ebnf", "value": "start: s\ns: s s s | s s | /[a-z ]/ |"}
    expected = generate(server, prompt="What color is the sky?").json()["generated_text"]
    fields = {"grammar": ambiguous, "temperature": 2, "seed": 1, "min_tokens": 99, "max_tokens": 100}
    refusal = generate(server, **fields)
    error = refusal.json()["error"]
    assert (refusal.status_code, error["code"], error["param"]) == (400, "grammar_failed", "grammar")
    events = server.stream("a", **fields)
    assert events[-1]["error"]["code"] == "grammar_failed" and len(events) > 1
    assert generate(server, prompt="What color is the sky?").json()["generated_text"] == expected
    server.wait_until_at_rest()


def test_a_killed_mask_process_changes_no_answer_and_the_worker_stays(server: ServerProcess) -> None:
    fields = {
        "grammar": {"type": "json_schema", "value": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 99}},
        "temperature": 1,
        "seed": 3,
        "max_tokens": 200,
    }
    expected = generate(server, **fields).json()["generated_text"]
    workers, killed = server.worker_pids(), server.mask_process_pids()  # two, where a tenant was slow
    body = {"prompt": "a", **fields}
    with httpx2.stream("POST", f"{server.url}/generate_stream", json=body, timeout=60) as response:
        received = events(response.iter_lines())
        first = next(received)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        *_, last = [first, *received]
    assert last["generated_text"] == expected
    started = server.mask_process_pids()
    assert server.worker_pids() == workers and killed and started and not set(started) & set(killed)


@pytest.mark.parametrize(("size", "param"), [(70_000, "grammar"), (2_000_000, None)])  # the latter for all fields
def test_a_grammar_over_the_size_limit_is_refused(server: ServerProcess, size: int, param: str | None) -> None:
    refusal = generate(server, grammar={"type": "ebnf", "value": 'start: "a"\n//' + "x" * size}, n=16)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, param)


def test_bad_words_and_logprobs_of_a_request_are_bounded(server: ServerProcess) -> None:
    words = ["🦊" * 200 + str(i) for i in range(64)]
    refusal = generate(server, bad_words=words, n=64)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "bad_words")
    body = {"prompts": ["a"] * 8, "n": 128, "max_tokens": 500, "logprobs": 20}
    refusal = server.client.post("/generate", json=body)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "logprobs")
