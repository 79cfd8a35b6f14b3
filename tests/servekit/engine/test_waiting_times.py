"""Claims about requests that would wait too long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.config import ServeConfig
from servekit.engine import waiting_times
from servekit.engine.engine_core import EngineCore
from servekit.engine.waiting_times import WaitingTimes
from servekit.errors import QueueFull
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.queued_work import QueuedWork
from servekit.scheduler.sequence import Sequence

SECONDS_EACH = 2.0  # that each sequence before a request takes


def core(max_drafts: int = 0, **num_of_tenants: int) -> EngineCore:
    """A core with so many waiting sequences, each of which makes those behind it wait.

    Those of the tenant `documents` are long.
    """
    queued = QueuedWork()
    for tenant, number in num_of_tenants.items():
        for _ in range(number):
            queued.add(
                Sequence(1, [1] * (1000 if tenant == "documents" else 4), SamplingParams(max_tokens=1), tenant=tenant)
            )
    config = SimpleNamespace(max_drafts=max_drafts)
    manager = SimpleNamespace(num_waiting=sum(num_of_tenants.values()), queued=queued, config=config)
    waiting_time = SimpleNamespace(seconds=lambda _, num_ahead, ahead: SECONDS_EACH * num_ahead)
    return cast(EngineCore, SimpleNamespace(manager=manager, latency=SimpleNamespace(waiting_time=waiting_time)))


def check(
    cores: list[EngineCore],
    tenant: str = "a",
    num_preparing: int = 0,
    prompt_tokens: int | None = None,
    scheduling_policy: Any = "fcfs",
) -> None:
    config = ServeConfig(max_predicted_wait=20.0, scheduling_policy=scheduling_policy)
    WaitingTimes(config, lambda: cores, lambda: 0.0).check(tenant, num_preparing, 0, prompt_tokens)


def test_a_request_that_would_wait_too_long_is_refused_and_told_when_to_come_back() -> None:
    check([core(a=10)])
    with pytest.raises(QueueFull, match="would wait about 34 s before it starts; the limit is 20 s") as refused:
        check([core(a=17)])
    assert refused.value.retry_after_s == 14


def test_requests_that_are_being_prepared_count() -> None:
    with pytest.raises(QueueFull):
        check([core(a=8)], num_preparing=3)


def test_the_replica_with_the_shortest_line_counts() -> None:
    check([core(a=100), core(a=2)])


def test_without_a_replica_that_takes_sequences_nothing_is_refused() -> None:
    check([])


def test_a_tenant_is_not_refused_for_the_line_of_another_one_under_fair() -> None:
    check([core(flooding=1000)], tenant="light", scheduling_policy="fair")
    with pytest.raises(QueueFull):
        check([core(flooding=1000)], tenant="flooding", scheduling_policy="fair")


def test_where_urgent_requests_overtake_all_others_none_is_refused_for_the_line() -> None:
    check([core(a=1000)], scheduling_policy="priority")


def test_under_shortest_only_prompts_that_are_not_longer_count_once_the_length_is_known() -> None:
    documents = [core(documents=1000)]
    check(documents, scheduling_policy="shortest")
    check(documents, prompt_tokens=500, scheduling_policy="shortest")
    with pytest.raises(QueueFull):
        check(documents, prompt_tokens=600, scheduling_policy="shortest")  # it counts as equally long
    # The oldest prompts have a fifth of the tokens, however long they are.
    check([core(a=8, documents=100)], prompt_tokens=5, scheduling_policy="shortest")
    with pytest.raises(QueueFull, match="would wait about 24 s"):
        check([core(a=9, documents=100)], prompt_tokens=5, scheduling_policy="shortest")


def test_under_other_policies_a_request_is_checked_once_before_its_prompt_is_known() -> None:
    check([core(a=1000)], prompt_tokens=1)


def test_with_drafts_nothing_is_refused() -> None:
    check([core(a=1000, max_drafts=4)])


async def test_an_error_that_comes_back_each_second_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting_times, "REFRESH_INTERVAL_S", 0.0)
    errors = iter([ValueError("first"), ValueError("again"), KeyError("other")] * 5)

    def refresh(*arguments: object) -> Iterator[None]:
        error = next(errors, None)
        if error is None:
            done.set()
            return iter(())
        raise error

    done = asyncio.Event()
    failing = cast(EngineCore, SimpleNamespace(manager=None, latency=SimpleNamespace(refresh_waiting_time=refresh)))
    task = asyncio.create_task(WaitingTimes(ServeConfig(), lambda: [failing], lambda: 0.0).keep_current())
    await asyncio.wait_for(done.wait(), 60)
    task.cancel()
    assert [type(each.exc_info[1]) for each in caplog.records if each.exc_info] == [ValueError, KeyError]
