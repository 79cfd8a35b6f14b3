"""Test runs: when requests start, and that each has a record of what became of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import uvloop

from loadtest.errors import LoadTestError
from loadtest.planning.plan import Plan, Request
from loadtest.record import Counted, Outcome, Record
from loadtest.running.clock import now_s
from loadtest.running.connection_pool import Pool
from loadtest.running.exchange import MAX_BUFFERED_BYTES, Exchange
from loadtest.running.expected_answers import expected_text
from loadtest.running.query import Query
from loadtest.running.runner import Runner, ShareResult
from loadtest.running.stream_reader import StreamReader
from loadtest.running.warm_up import warm_up
from loadtest.self_test.reference_server import ReferenceServer, Schedule
from loadtest.target import ApiFormat, Target
from tests.loadtest.running.test_connection import LIMITED, STREAM, WHOLE, Handler, chunk, read_request, saying, served
from tests.support.timing import again_if_late, assert_on_time, assert_within

QUICK = Schedule(first_s=0.005, gap_s=0.002)


def plan_of(*requests: Request, **settings: Any) -> Plan:
    return Plan(list(requests), "as given", "as given", 0, **settings)


def evenly(num: int, gap_s: float, schedule: Schedule = QUICK, num_tokens: int = 4) -> list[Request]:
    return [
        Request(number, number * gap_s, msgspec.structs.replace(schedule, number=number).prompt(), num_tokens)
        for number in range(num)
    ]


def at_once(num: int, schedule: Schedule = QUICK, num_tokens: int = 4) -> list[Request]:
    """Of a closed loop: no intended starts."""
    return [msgspec.structs.replace(request, intended_s=None) for request in evenly(num, 0.0, schedule, num_tokens)]


def conversation(*prompts: str, think_s: float = 0.0, intended_s: float | None = 0.0, first: int = 0) -> list[Request]:
    return [
        Request(
            first + number, None if number else intended_s, prompt, 4, first + number - 1 if number else None, think_s
        )
        for number, prompt in enumerate(prompts)
    ]


def result_of(main: Coroutine[Any, Any, ShareResult]) -> ShareResult:
    """Each request has one record."""

    async def watched() -> ShareResult:
        async with asyncio.timeout(60):
            return await main

    result = uvloop.run(watched())
    assert not result.errors
    assert [record.index for record in result.records] == list(range(len(result.records)))
    return result


def known_result(
    plan: Plan,
    api: ApiFormat = ApiFormat.GENERATE_STREAM,
    then: Callable[[Runner], None] | None = None,
    **settings: Any,
) -> ShareResult:
    """Against the server whose answers are known; `then` is called after 50 ms."""

    async def main() -> ShareResult:
        loop = asyncio.get_running_loop()
        known = ReferenceServer(loop)
        server = await loop.create_server(known, "127.0.0.1", 0)
        target = Target([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], api, **settings)
        one = Runner(target, plan)
        if then is not None:
            loop.call_later(0.05, then, one)
        result = await one.run(now_s() + 0.01)
        server.close()
        known.close()
        return result

    result = result_of(main())
    assert len(result.records) == len(plan.requests)
    return result


def run_known(
    plan: Plan,
    api: ApiFormat = ApiFormat.GENERATE_STREAM,
    then: Callable[[Runner], None] | None = None,
    **settings: Any,
) -> list[Record]:
    return known_result(plan, api, then, **settings).records


def run_against(
    handler: Handler, plan: Plan, api: ApiFormat = ApiFormat.GENERATE_STREAM, **settings: Any
) -> list[Record]:
    async def main() -> ShareResult:
        async with served(handler) as url:
            return await Runner(Target([url], api, **settings), plan).run(now_s())

    return result_of(main()).records


def outcomes(records: list[Record]) -> list[Outcome]:
    return [record.outcome for record in records]


# -- starts ------------------------------------------------------------------------------------------------------------


@again_if_late
def test_a_slow_server_does_not_move_starts() -> None:
    slow = Schedule(first_s=0.15, gap_s=0.0)
    records = run_known(plan_of(*evenly(15, 0.004, slow, num_tokens=1)))
    assert outcomes(records) == [Outcome.OK] * 15
    for number, record in enumerate(records):
        assert record.intended_s == pytest.approx(number * 0.004, abs=1e-6)
        assert record.started_s >= record.intended_s
        assert_within(0.08, record.started_s - record.intended_s)
    assert_within(min(record.ended_s for record in records), records[-1].started_s, "none waited for another")


@again_if_late
def test_starts_missed_by_a_stalled_client_are_made_up_in_order_and_recorded_as_late() -> None:
    records = run_known(plan_of(*evenly(20, 0.01)), then=lambda _: time.sleep(0.1))
    starts = [record.started_s for record in records]
    assert starts == sorted(starts)
    assert [record.intended_s for record in records] == pytest.approx([number * 0.01 for number in range(20)], abs=1e-6)
    assert max(record.started_s - record.intended_s for record in records) > 0.08
    assert_within(0.08, records[-1].started_s - records[-1].intended_s, "the plan was kept again")


@again_if_late
def test_latency_includes_the_wait_for_a_connection() -> None:
    slow = Schedule(first_s=0.03, gap_s=0.0)
    records = run_known(plan_of(*evenly(6, 0.001, slow, num_tokens=1)), max_connections=2)
    waits = sorted(record.started_s - record.intended_s for record in records)
    assert waits[2] > 0.02 and waits[4] > 0.05, "two rounds of two wait for those before"
    assert_within(waits[2] - 0.01, waits[1], "and the first round for no client")


@again_if_late
def test_closed_loop_clients_send_when_they_have_an_answer() -> None:
    records = run_known(plan_of(*at_once(12), num_clients=3))
    assert outcomes(records) == [Outcome.OK] * 12
    changes = sorted([(record.started_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    in_flight = [sum(change for _, change in changes[: place + 1]) for place in range(len(changes))]
    assert max(in_flight) == 3
    ends = sorted(record.ended_s for record in records)
    for place, record in enumerate(sorted(records, key=lambda record: record.intended_s)[3:]):
        assert_within(0.005, abs(record.intended_s - ends[place]), "nothing but an end kept it")
        assert_within(0.02, record.started_s - record.intended_s)


@again_if_late
def test_nothing_starts_after_the_duration_and_started_requests_finish() -> None:
    slow = Schedule(first_s=0.12, gap_s=0.0)
    late = [Request(number, 5.0, "x", 1) for number in range(5, 10)]
    records = run_known(plan_of(*evenly(5, 0.002, slow, num_tokens=1), *late, duration_s=0.1))
    assert_on_time(outcomes(records)[:5] == [Outcome.OK] * 5, "all of them start before the end")
    assert outcomes(records)[5:] == [Outcome.SKIPPED] * 5
    assert min(record.ended_s for record in records[:5]) > 0.12
    assert_within(1.0, max(record.ended_s for record in records))
    assert {record.error for record in records[5:]} == {"the run ended"}
    closed = run_known(plan_of(*at_once(50), num_clients=2, duration_s=0.05))
    assert_on_time({Outcome.OK, Outcome.SKIPPED} == set(outcomes(closed)), "some start before the end")
    assert_within(0.06, max(record.started_s for record in closed))


# -- conversations -----------------------------------------------------------------------------------------------------


@again_if_late
@pytest.mark.parametrize(
    "api", [ApiFormat.GENERATE_STREAM, ApiFormat.GENERATE, ApiFormat.COMPLETIONS, ApiFormat.CHAT, ApiFormat.TGI]
)
def test_a_turn_contains_the_conversation_so_far(api: ApiFormat) -> None:
    turns = conversation("Hello", " and", " then", think_s=0.02)
    records = run_known(plan_of(*turns), api)
    assert outcomes(records) == [Outcome.OK] * 3
    first = expected_text("Hello", 4)
    second = expected_text(f"Hello{first} and", 4)
    assert [record.num_prompt_tokens for record in records] == [
        5,
        len(f"Hello{first} and"),
        len(f"Hello{first} and{second} then"),
    ]
    for before, record in pairwise(records):
        assert record.intended_s == pytest.approx(before.ended_s + 0.02, abs=1e-6)
        assert record.started_s >= record.intended_s
        assert_within(0.05, record.started_s - record.intended_s)


def test_a_turn_is_not_sent_after_a_failed_one() -> None:
    handler = saying(WHOLE.replace(b"200 OK", b"503 No\r\nconnection: close"))
    records = run_against(handler, plan_of(*conversation("a", "b", "c")))
    assert outcomes(records) == [Outcome.REFUSED, Outcome.SKIPPED, Outcome.SKIPPED]
    assert {record.error for record in records[1:]} == {"the turn before failed"}
    two = [*conversation("a", "b", intended_s=None), *conversation("c", "d", intended_s=None, first=2)]
    closed = run_against(handler, plan_of(*two, num_clients=1))
    assert outcomes(closed) == [Outcome.REFUSED, Outcome.SKIPPED] * 2, "its client begins the next"


def test_a_client_of_a_closed_loop_ends_its_conversation_before_the_next() -> None:
    turns = [
        turn for number in range(4) for turn in conversation("a", "b", think_s=0.01, intended_s=None, first=2 * number)
    ]
    records = run_known(plan_of(*turns, num_clients=1), verifies=True)
    assert outcomes(records) == [Outcome.OK] * 8
    starts = [record.started_s for record in records]
    assert starts == sorted(starts)


# -- what becomes of requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", list(ApiFormat))
def test_each_api_gives_complete_records(api: ApiFormat) -> None:
    records = run_known(plan_of(*evenly(5, 0.002, num_tokens=6)), api, verifies=api is not ApiFormat.CHAT)
    for record, request in zip(records, evenly(5, 0.002), strict=True):
        assert (record.outcome, record.error, record.status) == (Outcome.OK, "", 200)
        assert (record.num_output_tokens, record.num_prompt_tokens) == (6, len(request.prompt))
        assert (record.counted_by, record.finish_reason) == (Counted.USAGE, "length")
        assert record.tokens_per_event is None
        times = [record.started_s, *record.token_times_s, record.ended_s]
        assert times == sorted(times) and len(record.token_times_s) == (0 if api is ApiFormat.GENERATE else 6)


@again_if_late
def test_long_streams_are_read_while_they_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = Query.read

    def note(query: Query) -> StreamReader:
        sizes.append(len(query.received))
        return read(query)

    monkeypatch.setattr(Query, "read", note)
    schedule = Schedule(first_s=0.0, gap_s=0.001)
    (record,) = run_known(plan_of(*evenly(1, 0.0, schedule, num_tokens=300)), verifies=True)
    assert record.outcome is Outcome.OK and len(record.token_times_s) == 300
    assert record.token_times_s == sorted(record.token_times_s)
    assert sum(sizes) > 300 * 100
    assert all(size >= MAX_BUFFERED_BYTES for size in sizes[:-1])
    assert_on_time(len(sizes) >= 3, "it is read in pieces if it arrives in pieces")


ANSWERS: dict[str, tuple[Handler, Outcome, str]] = {
    "a refusal": (
        saying(b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n" % len(LIMITED) + LIMITED),
        Outcome.REFUSED,
        "rate_limited",
    ),
    "a refusal without words": (saying(b"HTTP/1.1 502 No\r\ncontent-length: 0\r\n\r\n"), Outcome.REFUSED, "502"),
    "no stream": (saying(WHOLE), Outcome.GARBLED, "the content-type of the answer is not text/event-stream"),
    "no end": (
        saying(STREAM + b"0\r\n\r\n"),
        Outcome.GARBLED,
        "the stream ended without its end mark",
    ),
    "an error and the end of all": (
        saying(STREAM + chunk(b"data: " + LIMITED + b"\n\n")),
        Outcome.FAILED,
        "rate_limited",
    ),
    "a cut": (saying(STREAM + b"5\r\ndata:\r\n"), Outcome.CUT, "closed in the middle of the answer"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_each_kind_of_failure_has_its_own_outcome(answer: tuple[Handler, Outcome, str]) -> None:
    handler, outcome, error = answer
    (record,) = run_against(handler, plan_of(Request(0, 0.0, "x", 4)))
    assert (record.outcome, record.error) == (outcome, error)
    assert record.num_output_tokens == 0 and record.counted_by is Counted.NONE


def test_bytes_after_the_end_make_only_their_own_request_garbled() -> None:
    done = b"data: " + msgspec.json.encode({"index": 4, "token": {"text": "abcd"}, "finish_reason": "length"}) + b"\n\n"
    answer = STREAM + chunk(done) + b"0\r\n\r\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            writer.write(answer)
            if msgspec.json.decode(body)["prompt"] == "twice":
                await asyncio.sleep(0.02)
                writer.write(answer)

    prompts = ["x", "twice", "x", "x"]
    plan = plan_of(*(Request(number, number * 0.1, prompt, 4) for number, prompt in enumerate(prompts)))
    seen: list[tuple[int, int]] = []

    async def main() -> ShareResult:
        async with served(handle) as url:
            target = Target([url], ApiFormat.GENERATE_STREAM)
            one = Runner(target, plan, on_progress=lambda now: seen.append((now.num_ok, now.num_failed)))
            return await one.run(now_s())

    records = result_of(main()).records
    assert outcomes(records) == [Outcome.OK, Outcome.GARBLED, Outcome.OK, Outcome.OK]
    assert records[1].error == "bytes after the end" and records[1].num_output_tokens == 4
    assert seen[-1] == (3, 1)


@again_if_late
def test_a_timeout_keeps_the_tokens_that_came_before() -> None:
    slow = Schedule(first_s=0.01, gap_s=10.0)
    records = run_known(plan_of(*evenly(3, 0.001, slow)), timeout_s=0.05)
    assert outcomes(records) == [Outcome.TIMEOUT] * 3
    for record in records:
        assert_on_time(record.num_output_tokens == 1, "the first token comes before the timeout")
        assert len(record.token_times_s) == 1 and record.error == "in the middle of the answer"
        assert record.ended_s - record.started_s >= 0.05
        assert_within(0.2, record.ended_s - record.started_s)
    first, second = run_known(plan_of(*evenly(2, 0.0, slow)), timeout_s=0.05, max_connections=1)
    assert second.error == "without a connection for the answer"
    assert_on_time(first.error == "in the middle of the answer", "the first token comes before the timeout")


@again_if_late
def test_a_stopped_run_returns_all_records() -> None:
    slow = Schedule(first_s=0.005, gap_s=10.0)
    stopped = run_known(plan_of(*evenly(5, 0.002, slow), Request(5, 5.0, "x", 4)), then=Runner.stop)
    assert_on_time(outcomes(stopped) == [Outcome.CUT] * 5 + [Outcome.SKIPPED], "five start before the stop")
    assert {record.error for record in stopped} == {"stopped by the user"}
    num_tokens = [record.num_output_tokens for record in stopped]
    assert_on_time(num_tokens == [1, 1, 1, 1, 1, 0], "the first tokens come before the stop")
    assert_within(0.2, max(record.ended_s for record in stopped))
    closed = run_known(plan_of(*at_once(9, slow), num_clients=2), then=Runner.stop)
    assert Counter(outcomes(closed)) == {Outcome.CUT: 2, Outcome.SKIPPED: 7}
    thinking = run_known(plan_of(*conversation("a", "b", "c", think_s=5.0)), then=Runner.stop)
    assert outcomes(thinking)[1:] == [Outcome.SKIPPED, Outcome.SKIPPED]
    assert_on_time(outcomes(thinking)[0] == Outcome.OK, "the first turn ends before the stop")


def turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many requests were skipped, by the turn of the loop in which they were."""
    skipped: Counter[int] = Counter()
    skip, begin_due = Runner._skip, Runner._begin_due
    turns = 0

    def count(one: Runner, *which: Any) -> None:
        skipped[turns] += 1
        skip(one, *which)

    def turn(one: Runner) -> None:
        nonlocal turns
        turns += 1
        begin_due(one)

    monkeypatch.setattr(Runner, "_skip", count)
    monkeypatch.setattr(Runner, "_begin_due", turn)
    return skipped


@again_if_late
@pytest.mark.parametrize("is_open", [True, False])
def test_the_rest_of_a_large_plan_is_recorded_in_slices(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    skipped = turns_of_the_loop(monkeypatch)
    num = 20_000
    requests = [*evenly(2, 0.0), *(Request(number, 1000.0 + number, "x", 1) for number in range(2, num))]
    if not is_open:
        requests = [msgspec.structs.replace(request, intended_s=None) for request in requests]
    plan = plan_of(*requests, num_clients=None if is_open else 2, duration_s=0.03)
    outcomes_of = Counter(outcomes(known_result(plan).records))
    assert sum(outcomes_of.values()) == num
    assert_on_time(outcomes_of.keys() == {Outcome.OK, Outcome.SKIPPED}, "the first ones end before the run")
    # In half a millisecond, which was the whole of it before.
    assert len(skipped) >= 5 and max(skipped.values()) < num / 2


@again_if_late
def test_work_after_a_stop_is_not_counted_as_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = Pool.cancel

    def slowly(pool: Pool, exchange: Exchange, outcome: Outcome, error: str) -> None:
        time.sleep(0.15)
        cancel(pool, exchange, outcome, error)

    monkeypatch.setattr(Pool, "cancel", slowly)
    result = known_result(plan_of(*evenly(2, 0.01, Schedule(first_s=10.0))), then=Runner.stop)
    assert_on_time(outcomes(result.records) == [Outcome.CUT] * 2, "both start before the stop")
    assert_within(0.15, max(result.lags_s))


def test_a_wrong_answer_is_found_and_a_right_one_is_none() -> None:
    async def liar(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_request(reader)
        text = expected_text(msgspec.json.decode(body)["prompt"], 4)[:3] + "\x01"
        reply = msgspec.json.encode({"index": 4, "token": {"text": text}, "finish_reason": "length"})
        writer.write(STREAM.replace(b"transfer-encoding: chunked\r\n", b"") + b"data: " + reply + b"\n\n")

    request = Request(0, 0.0, "x", 4)
    (record,) = run_against(liar, plan_of(request), verifies=True)
    assert (record.outcome, record.error) == (Outcome.WRONG, "differs from character 3 on")
    assert record.tokens_per_event == [4]
    (unverified,) = run_against(liar, plan_of(request))
    assert unverified.outcome is Outcome.OK


def test_a_batch_is_one_request_and_a_record_for_each_prompt() -> None:
    bodies: list[dict[str, Any]] = []

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            asked = msgspec.json.decode(body)
            bodies.append(asked)
            num = len(asked["prompts"])
            usage = {"prompt_tokens": num, "completion_tokens": 4 * num}
            reply = msgspec.json.encode({"generated_texts": ["abcd"] * num, "usage": usage})
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(reply), reply))

    requests = [Request(number, number * 0.01, str(number), 4 if number < 7 else 5) for number in range(9)]
    records = run_against(count, plan_of(*requests), ApiFormat.GENERATE, batch_size=3)
    assert outcomes(records) == [Outcome.OK] * 9
    assert [(len(body["prompts"]), body["max_tokens"]) for body in bodies] == [(3, 4), (3, 4), (1, 4), (2, 5)]
    assert [round(record.intended_s, 6) for record in records] == [0.02] * 3 + [0.05] * 3 + [0.06] + [0.08] * 2
    closed = [msgspec.structs.replace(request, intended_s=None) for request in requests]
    assert (
        outcomes(run_against(count, plan_of(*closed, num_clients=2), ApiFormat.GENERATE, batch_size=3))
        == [Outcome.OK] * 9
    )


def test_a_run_without_keep_alive_opens_a_connection_for_each_request() -> None:
    num_connections = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while True:
            await read_request(reader)
            reply = msgspec.json.encode(
                {"generated_texts": ["abcd"], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}
            )
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(reply), reply))

    plan = plan_of(*(Request(number, None, str(number), 4) for number in range(5)), num_clients=1)
    for keep_alive, expected in ((True, 1), (False, 5)):
        num_connections = 0
        records = run_against(count, plan, ApiFormat.GENERATE, keep_alive=keep_alive)
        assert outcomes(records) == [Outcome.OK] * 5 and num_connections == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": []}, "no URL"),
        ({"api": ApiFormat.CHAT, "verifies": True}, "--verify does not work with --api chat"),
        ({"batch_size": 2}, "--batch-size 2"),
        ({"max_connections": 0}, "--max-connections 0"),
        ({"timeout_s": -2.0}, "--timeout -2"),
        ({"timeout_s": math.nan}, "--timeout nan"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        Runner(Target(**{"urls": ["http://127.0.0.1:1"], "api": ApiFormat.COMPLETIONS} | settings), plan_of())


def test_a_failed_warm_up_gives_the_reason() -> None:
    target = Target(["http://127.0.0.1:1"], ApiFormat.COMPLETIONS)
    with pytest.raises(
        LoadTestError, match=r"none of 3 warm-up requests .* connection refused; check that the server runs"
    ):
        uvloop.run(warm_up(target, at_once(3)))


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (
            b'{"error": {"message": "no temprature", "code": "unknown"}}',
            "unknown; the server at .* says: no temprature",
        ),
        (b"", "refused, 400; check that the server runs"),
    ],
)
def test_a_refused_warm_up_quotes_the_server(body: bytes, reported: str) -> None:
    async def main() -> None:
        async with served(saying(b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n" % len(body) + body)) as url:
            await warm_up(Target([url], ApiFormat.COMPLETIONS), at_once(2))

    with pytest.raises(LoadTestError, match=reported):
        uvloop.run(main())
