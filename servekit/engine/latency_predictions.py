"""Predict requests when they are admitted, and compare the predictions with the outcomes, for metrics.

A prediction simulates the next steps on copies of the workload manager, which takes longer than a request may hold the
event loop. So one request is predicted at a time, in slices, and requests that are admitted meanwhile are not
predicted. The state for the prediction is saved when the request is admitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator

from msgspec import Struct

from servekit.engine.engine_core import EngineCore
from servekit.latency.latency_predictor import LatencyPrediction
from servekit.observability.observer import Observer
from servekit.scheduler.sequence import FinishReason, Sequence

log = logging.getLogger("servekit")

MAX_STEPS = 1000  # simulated steps; a first token that is farther away is not predicted
PREDICTIONS_PER_END = 4  # one in this many predictions includes the last token, which takes many times as long
MAX_SLICE_S = 1e-3
PAUSES_PER_SLICE = 100.0  # a pause is so many times as long as the slice before it: 1 % of the event loop's time
NOTHING = object()  # means that there is no request to predict


class _Outcome(Struct, frozen=True):
    """When the first and the last token of a sequence came, as far as they did."""

    first_token_s: float | None
    end_s: float | None  # None if something else ended it: it would have become longer


class _Predicted(Struct, kw_only=True):
    """One sequence that is predicted."""

    core: EngineCore
    sequence: Sequence
    epoch: int  # of the core's manager; if the worker is lost, the prediction is not valid
    rolling: Generator[None, None, LatencyPrediction | None]
    save_s: float  # what it took to save the state that it is predicted from
    prediction: LatencyPrediction | None = None
    outcome: _Outcome | None = None


class LatencyPredictions(Observer):
    """Predicts some of the requests. Everything runs on the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wake = asyncio.Event()
        self._current: _Predicted | None = None  # the prediction that is being simulated
        self._open: dict[int, _Predicted] = {}  # by sequence id, of those that have not ended
        self._num_begun = 0
        self._is_off = False  # after an error

    def admitted(self, core: EngineCore, sequence: Sequence) -> None:
        """Save what a sequence is predicted from that was just added, unless another one is being predicted."""
        if self._is_off or self._current is not None:
            return
        try:
            self._current = self._begin(core, sequence)
        except Exception:  # serving must not depend on a prediction
            self._switch_off()
        if self._current is not None:
            self._open[sequence.sequence_id] = self._current
            self._wake.set()

    def _begin(self, core: EngineCore, sequence: Sequence) -> _Predicted | None:
        manager, latency = core.manager, core.latency
        if not core.plans_steps:  # when the next worker will be ready is not known
            return None
        if manager.config.max_drafts or not latency.waiting_time.may_play(manager):
            return None
        to_end = self._num_begun % PREDICTIONS_PER_END == 0
        began_s = self._clock()
        rolling = latency.predict_in_slices(manager, sequence.sequence_id, began_s, MAX_STEPS, to_end=to_end)
        if next(rolling, NOTHING) is NOTHING:  # no step was measured yet
            return None
        self._num_begun += 1
        save_s = self._clock() - began_s
        return _Predicted(core=core, sequence=sequence, epoch=manager.epoch, rolling=rolling, save_s=save_s)

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_tokens: int,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        predicted = self._open.pop(sequence.sequence_id, None)
        if predicted is not None and predicted.sequence is sequence:
            is_own_end = reason in (FinishReason.STOP, FinishReason.LENGTH)
            predicted.outcome = _Outcome(first_token_s, last_token_s if is_own_end else None)
            _compare(predicted)

    async def run(self) -> None:
        """Play the copies of what was admitted, until this is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            predicted = self._current
            assert predicted is not None
            try:
                predicted.prediction = await self._play(predicted)
                _compare(predicted)
            except Exception:
                self._switch_off()
            self._current = None

    def _switch_off(self) -> None:
        self._is_off = True
        log.exception("a request could not be predicted; prediction is off until the server starts again")

    async def _play(self, predicted: _Predicted) -> LatencyPrediction | None:
        began_s = self._clock() - predicted.save_s  # part of the first slice
        while True:
            try:
                next(predicted.rolling)
            except StopIteration as stop:
                prediction: LatencyPrediction | None = stop.value
                await asyncio.sleep(PAUSES_PER_SLICE * (self._clock() - began_s))
                return prediction
            slice_s = self._clock() - began_s
            if slice_s >= MAX_SLICE_S:
                await asyncio.sleep(PAUSES_PER_SLICE * slice_s)
                began_s = self._clock()


def _compare(predicted: _Predicted) -> None:
    """Compare a prediction with its outcome, once both are there."""
    prediction, outcome, core = predicted.prediction, predicted.outcome, predicted.core
    if prediction is None or outcome is None or core.manager.epoch != predicted.epoch:
        return
    if outcome.first_token_s is not None:
        core.latency.measured(prediction, outcome.first_token_s)
        if outcome.end_s is not None:
            core.latency.ended(prediction, outcome.end_s)
