"""Claims about the predictions that a server makes of its requests, and what it learns from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.engine.engine_core import EngineCore
from servekit.engine.latency_predictions import LatencyPredictions
from servekit.latency.calibration import Band
from servekit.latency.latency_predictor import LatencyPrediction
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence import FinishReason, Sequence


class Latency:
    """A predictor that takes a slice for each copy."""

    def __init__(self, *, is_known: bool = True, fails: str = "") -> None:
        self.is_known = is_known
        self.fails = fails
        self.may_play = True
        self.num_asked = 0
        self.waiting_time = SimpleNamespace(may_play=lambda _: self.may_play)
        self.asked: list[tuple[int, bool]] = []  # sequence ids, and whether up to the end
        self.first_tokens: list[tuple[int, float]] = []
        self.ends: list[tuple[int, float]] = []

    def predict_in_slices(
        self, manager: object, sequence_id: int, now_s: float, max_steps: int, *, to_end: bool
    ) -> Generator[None, None, LatencyPrediction | None]:
        self.num_asked += 1
        if self.fails == "begin":
            raise ValueError("planted")
        if not self.is_known:
            return None
        self.asked.append((sequence_id, to_end))
        yield
        if self.fails == "play":
            raise ValueError("planted")
        yield
        return LatencyPrediction(sequence_id, now_s, Band(0.5, 1.0, 2.0), 1.0, 0.1, 3.0 if to_end else None)

    def measured(self, prediction: LatencyPrediction, first_token_s: float) -> None:
        self.first_tokens.append((prediction.sequence_id, first_token_s))

    def ended(self, prediction: LatencyPrediction, last_token_s: float) -> None:
        self.ends.append((prediction.sequence_id, last_token_s))


class Server:
    """The parts of an engine that predictions need."""

    def __init__(self, **options: Any) -> None:
        self.latency = Latency(**options)
        self.manager = SimpleNamespace(epoch=0, config=SimpleNamespace(max_drafts=0))
        core = SimpleNamespace(manager=self.manager, latency=self.latency, plans_steps=True)
        self.core = cast(EngineCore, core)
        self.predictions = LatencyPredictions(lambda: 0.0)
        self.task = asyncio.create_task(self.predictions.run())

    def admit(self, sequence_id: int) -> Sequence:
        sequence = Sequence(sequence_id, [1], SamplingParams(max_tokens=1))
        self.predictions.admitted(self.core, sequence)
        return sequence

    def end(self, sequence: Sequence, reason: FinishReason = FinishReason.LENGTH, first: float | None = 1.0) -> None:
        self.predictions.sequence_ended(sequence, reason, 1, first, 4.0, 4.0)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_predictions_are_compared_with_what_came_of_them() -> None:
    server = Server()
    first = server.admit(1)
    await server.settle()
    server.end(first)
    second = server.admit(2)
    server.end(second)  # before its copies were played
    assert server.latency.first_tokens == [(1, 1.0)]
    await server.settle()
    assert server.latency.first_tokens == [(1, 1.0), (2, 1.0)]
    assert server.latency.asked == [(1, True), (2, False)]
    assert server.latency.ends == [(1, 4.0), (2, 4.0)]
    server.task.cancel()


async def test_requests_that_come_while_another_one_is_predicted_are_not() -> None:
    server = Server()
    server.admit(1)
    server.admit(2)
    await server.settle()
    server.admit(3)
    assert [sequence_id for sequence_id, _ in server.latency.asked] == [1, 3]
    server.task.cancel()


async def test_what_was_predicted_for_a_lost_worker_and_what_clients_ended_teaches_nothing_of_it() -> None:
    server = Server()
    lost = server.admit(1)
    await server.settle()
    server.manager.epoch += 1
    server.end(lost)
    aborted = server.admit(2)
    await server.settle()
    server.end(aborted, FinishReason.ABORT)
    early = server.admit(3)
    await server.settle()
    server.end(early, FinishReason.ABORT, first=None)
    assert server.latency.first_tokens == [(2, 1.0)] and not server.latency.ends
    server.task.cancel()


async def test_nothing_is_predicted_where_nothing_is_known_or_too_much_must_be_copied() -> None:
    server = Server(is_known=False)
    server.admit(1)
    server.latency.is_known, server.latency.may_play = True, False
    server.admit(2)
    server.latency.may_play, server.manager.config.max_drafts = True, 4
    server.admit(3)
    await server.settle()
    assert not server.latency.asked
    server.task.cancel()


async def test_nothing_is_predicted_while_there_is_no_worker() -> None:
    server = Server()
    cast(Any, server.core).plans_steps = False
    server.admit(1)
    await server.settle()
    assert not server.latency.num_asked
    cast(Any, server.core).plans_steps = True
    server.admit(2)
    await server.settle()
    assert server.latency.asked == [(2, True)]
    server.task.cancel()


@pytest.mark.parametrize("when", ["begin", "play"])
async def test_an_error_is_logged_once_and_ends_the_predictions(when: str, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(fails=when)
    for sequence_id in (1, 2):
        server.end(server.admit(sequence_id))
        await server.settle()
    assert server.latency.num_asked == 1 and not server.latency.first_tokens
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1
    server.task.cancel()


async def test_what_it_took_to_save_the_state_is_part_of_the_first_pause() -> None:
    """20 s, so the pause is longer than this test."""
    server = Server()
    now_s, predict = 0.0, server.latency.predict_in_slices

    def slow(*arguments: Any, **options: Any) -> Generator[None, None, LatencyPrediction | None]:
        nonlocal now_s
        now_s += 20.0
        return predict(*arguments, **options)

    server.predictions._clock = lambda: now_s
    server.latency.predict_in_slices = slow  # type: ignore[method-assign]
    server.end(server.admit(1))
    await server.settle()
    server.admit(2)
    assert server.latency.asked == [(1, True)] and not server.latency.first_tokens
    server.task.cancel()
