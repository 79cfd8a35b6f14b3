"""Tests of the client queue: nothing is lost, and readers wake neither too early nor too late."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.errors import ServekitError, WorkerLost
from servekit.scheduler.sequence import FinishReason

LOST = WorkerLost("lost")


def token(index: int, number: int = 0, ends: bool = False) -> TokenDelta:
    return TokenDelta(index, number, "", False, FinishReason.LENGTH if ends else None)


async def taken(queue: ClientQueue) -> list[TokenDelta] | ServekitError | None:
    """What a reader gets now; None if it would have to wait."""
    reader = asyncio.create_task(queue.get())
    for _ in range(3):
        await asyncio.sleep(0)
    reader.cancel()
    (outcome,) = await asyncio.gather(reader, return_exceptions=True)
    if isinstance(outcome, asyncio.CancelledError):
        return None
    assert isinstance(outcome, list | ServekitError)
    return outcome


async def test_the_first_token_wakes_the_reader_at_once_and_later_ones_in_batches() -> None:
    queue = ClientQueue(interval=3)
    assert await taken(queue) is None
    queue.put(token(0, 1))
    assert await taken(queue) == [token(0, 1)]
    for number in range(4):
        queue.put(token(number % 2, number))
        assert await taken(queue) is None
    queue.put(token(0, 4))
    assert [delta.token_id for delta in await queue.get()] == list(range(5))
    queue.put(token(0, 5))
    assert await taken(queue) is None, "counted from the last time that anything was taken"


async def test_an_end_wakes_the_reader_and_a_sequence_without_tokens_delays_no_other() -> None:
    queue = ClientQueue(interval=2)
    queue.put(token(0))
    await queue.get()
    queue.put(token(0, 1))
    queue.put(token(1, 2, ends=True))
    assert await taken(queue) == [token(0, 1), token(1, 2, ends=True)]
    queue.put(token(0, 3))
    assert await taken(queue) is None
    queue.put(token(0, 4))
    assert await taken(queue) == [token(0, 3), token(0, 4)]


async def test_a_failure_wakes_the_reader_and_is_raised_after_pending_deltas_every_time() -> None:
    queue = ClientQueue(interval=9)
    queue.put(token(0))
    await queue.get()
    queue.put(token(0, 1))
    queue.fail(LOST)
    assert await taken(queue) == [token(0, 1)]
    assert [await taken(queue) for _ in range(2)] == [LOST, LOST]


async def test_a_function_takes_what_is_pending_in_place_of_the_reader_until_it_takes_no_more() -> None:
    queue, offered = ClientQueue(interval=2), list[list[int | None]]()

    def take(deltas: list[TokenDelta]) -> bool:
        offered.append([delta.token_id for delta in deltas])
        return len(offered) < 3

    reader = asyncio.create_task(queue.get(take))
    await asyncio.sleep(0)
    for number in range(6):
        queue.put(token(0, number))
        await asyncio.sleep(0)
    assert offered == [[0], [1, 2], [3, 4]], "the first at once, then two at a time"
    assert [delta.token_id for delta in await reader] == [3, 4, 5], "it did not take the last two"
    queue.put(token(0, 6, ends=True))
    assert [delta.token_id for delta in await queue.get()] == [6] and len(offered) == 3


async def test_a_failure_of_the_function_that_takes_is_raised_by_the_reader() -> None:
    queue = ClientQueue()
    reader = asyncio.create_task(queue.get(lambda deltas: bool(1 / (deltas[0].index - 1))))
    await asyncio.sleep(0)
    queue.put(token(0))
    await asyncio.sleep(0)
    assert not reader.done()
    queue.put(token(1))
    (outcome,) = await asyncio.gather(reader, return_exceptions=True)
    assert isinstance(outcome, ZeroDivisionError)


async def test_a_reader_that_was_woken_or_cancelled_is_offered_nothing_more() -> None:
    queue, offered = ClientQueue(), list[TokenDelta]()

    def take(deltas: list[TokenDelta]) -> bool:
        offered.extend(deltas)
        return True

    for is_cancelled in (False, True):
        reader = asyncio.create_task(queue.get(take))
        await asyncio.sleep(0)
        if is_cancelled:
            reader.cancel()
        else:
            queue.wake()
        await asyncio.wait([reader])
        queue.put(token(0))
        await asyncio.sleep(0)
        assert not offered and await taken(queue) == [token(0)]


async def test_a_waiting_reader_wakes_once_for_several_deltas() -> None:
    queue = ClientQueue()
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    for number in range(4):
        queue.put(token(0, number))
    assert [delta.token_id for delta in await reader] == [0, 1, 2, 3]


Actions = st.lists(st.sampled_from(["token", "token", "token", "end", "look", "look"]), max_size=60)


@settings(max_examples=200, deadline=None)
@given(Actions, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False), st.booleans())
def test_any_reader_gets_all_deltas_in_order_and_waits_only_below_the_interval(
    actions: list[str], num_sequences: int, interval: int, random: Random, fails: bool
) -> None:
    asyncio.run(_read(actions, num_sequences, interval, random, fails))


def max_per_sequence(pending: list[TokenDelta]) -> int:
    """The largest number of tokens of one sequence."""
    return max(Counter(delta.index for delta in pending).values(), default=0)


async def _read(actions: list[str], num_sequences: int, interval: int, random: Random, fails: bool) -> None:
    queue = ClientQueue(interval)
    unfinished = list(range(num_sequences))
    put: list[TokenDelta] = []
    got: list[TokenDelta] = []
    for number, action in enumerate(actions):
        if action == "look":
            pending = put[len(got) :]
            batch = await taken(queue)
            if batch is None:
                assert not pending or got, "the first is not waited for"
                assert max_per_sequence(pending) < interval
                assert all(delta.finish_reason is None for delta in pending), "an end is not waited for"
            else:
                assert batch == pending
                has_end = any(delta.finish_reason for delta in pending)
                assert not got or has_end or max_per_sequence(pending) >= interval, "woken for too little"
                got += pending
        elif unfinished:
            index = random.choice(unfinished)
            put.append(token(index, number, ends=action == "end"))
            queue.put(put[-1])
            if action == "end":
                unfinished.remove(index)
    if fails:
        queue.fail(LOST)
        if put[len(got) :]:
            assert await taken(queue) == put[len(got) :]
        assert await taken(queue) is LOST
