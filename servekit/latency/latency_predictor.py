"""Predict the first token and the end of a sequence, and how long a new one would wait.

A `LatencyPredictor` watches one workload manager: a live one, one in virtual time, or one that is replayed from a
journal. It learns step times, lengths of answers, and the errors of its own predictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from math import exp, hypot, log

from msgspec import Struct

from servekit.latency.answer_lengths import AnswerLengths
from servekit.latency.calibration import Band, Calibration
from servekit.latency.latency_model import LatencyModel, StepWork
from servekit.latency.prediction_quality import PredictionQuality
from servekit.latency.roll_forward import RollForward
from servekit.latency.waiting_time import WaitingTime
from servekit.protocol.messages import StepPlan
from servekit.scheduler.checkpoint import save_manager
from servekit.scheduler.recording import ReplayWatcher
from servekit.scheduler.sequence import FinishReason
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager

MIN_SPREAD = 0.02  # of the logarithm of a predicted time


class LatencyPrediction(Struct, frozen=True):
    """What was predicted for one sequence. Durations are from `predicted_s` on."""

    sequence_id: int
    predicted_s: float
    first_token: Band
    raw_s: float  # until the first token, before it was corrected by earlier errors
    spread: float  # the standard deviation of its logarithm
    end_s: float | None  # until the last token; None if that was not asked for


class _InFlight(Struct, frozen=True, gc=False):
    """A step in flight."""

    epoch: int
    step_id: int
    planned_s: float
    work: StepWork
    has_loads: bool  # whether KV blocks are loaded: such times say nothing about other steps


class LatencyPredictor(ReplayWatcher):
    """Learns from one workload manager, and predicts what it will do.

    `planned` and `committed` are called after each plan and each commit, as by a replay.
    """

    NUM_ROLLS = 5  # simulations with different lengths of answers; their mean and spread are used

    def __init__(self, *, learns: bool = True) -> None:
        """Without `learns`, it uses the step times and the lengths of answers that it has taken over.

        It still learns the present speed of the worker, and how far its predictions are off.
        """
        self.model = LatencyModel()
        self.lengths = AnswerLengths()
        self.calibration = Calibration()
        self.waiting_time = WaitingTime(self.model, self.lengths)
        self.quality = PredictionQuality()
        self.learns = learns
        self._in_flight: deque[_InFlight] = deque()
        self._last_done_s = 0.0

    def take_over(self, other: LatencyPredictor) -> None:
        """Begin with what another predictor has learned. After that, both share what they learn."""
        self.model, self.lengths, self.calibration = other.model, other.lengths, other.calibration
        self.waiting_time = other.waiting_time

    # -- learning -----------------------------------------------------------------------------------------------------

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        """Note a step that was sent to the worker."""
        if self._in_flight and self._in_flight[-1].epoch != plan.epoch:
            self._in_flight.clear()
        work = StepWork.of(plan, self._idle_s(now_s))
        self._in_flight.append(_InFlight(plan.epoch, plan.step_id, now_s, work, bool(plan.loads)))

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        """Learn from a result: from the time of its step, and from the answers that it ended."""
        in_flight = self._in_flight
        if len(in_flight) > manager.num_in_flight:
            step = in_flight.popleft()
            if len(in_flight) == manager.num_in_flight:
                # The time at which the worker could begin: when the step was sent, or when the step before it was done.
                seconds = now_s - max(step.planned_s, self._last_done_s)
                if not step.has_loads:
                    learn = self.model.observe if self.learns else self.model.follow
                    learn(step.work, seconds)
            else:  # Several results came late, or the worker was lost. Such times do not show how long one step takes.
                while len(in_flight) > manager.num_in_flight:
                    in_flight.popleft()
            self._last_done_s = now_s
        if self.learns:
            # Almost no token ends its sequence. Whether there is a reason is asked first, which takes less time.
            reasons = {FinishReason.STOP, FinishReason.LENGTH}
            for token in [each for each in tokens if each.finish_reason is not None and each.finish_reason in reasons]:
                is_cut = token.finish_reason is FinishReason.LENGTH
                self.lengths.record(token.sequence.num_output_tokens, is_cut)

    def measured(self, prediction: LatencyPrediction, first_token_s: float) -> None:
        """Learn when the first token of a sequence came that was predicted."""
        measured_s = first_token_s - prediction.predicted_s
        self.quality.first_token(prediction.first_token, measured_s)
        self.calibration.observe(prediction.raw_s, prediction.spread, prediction.first_token, measured_s, first_token_s)

    def ended(self, prediction: LatencyPrediction, last_token_s: float) -> None:
        """Note when the last token of a sequence came, if its end was predicted."""
        if prediction.end_s is not None:
            self.quality.end(prediction.end_s, last_token_s - prediction.predicted_s)

    # -- predicting ---------------------------------------------------------------------------------------------------

    def predict(
        self, manager: WorkloadManager, sequence_id: int, now_s: float, max_steps: int, *, to_end: bool = False
    ) -> LatencyPrediction | None:
        """Predict the first token of a sequence that waits, or runs without one; None if `max_steps` are too few.

        With `to_end`, its last token, too. This takes as long as saving and restoring the manager, and planning and
        committing so many steps, each `NUM_ROLLS` times. None, too, before a step was measured.
        """
        rolling = self.predict_in_slices(manager, sequence_id, now_s, max_steps, to_end=to_end)
        while True:
            try:
                next(rolling)
            except StopIteration as stop:
                prediction: LatencyPrediction | None = stop.value
                return prediction

    def predict_in_slices(
        self, manager: WorkloadManager, sequence_id: int, now_s: float, max_steps: int, *, to_end: bool = False
    ) -> Generator[None, None, LatencyPrediction | None]:
        """Like `predict`, as a generator that returns the prediction. Other tasks may run wherever it yields."""
        if not self.model.is_known or manager.num_in_flight != len(self._in_flight):
            return None
        state, in_flight_s, idle_s = save_manager(manager), self._expected_ends(now_s), self._idle_s(now_s)
        first_tokens_s, ends_s = [], []
        for draw in range(self.NUM_ROLLS):
            yield
            roll = RollForward(manager.config, state, self.model, self.lengths, now_s, in_flight_s, draw, idle_s)
            yield  # a copy with 32,768 blocks takes about 5 ms
            wanted = roll.ends_s if to_end else roll.first_tokens_s
            while sequence_id not in wanted:
                if roll.num_steps == max_steps or not roll.step():
                    return None
                yield
            first_tokens_s.append(roll.first_tokens_s[sequence_id] - now_s)
            ends_s.append(roll.ends_s.get(sequence_id, now_s) - now_s)
            del roll  # before the next copy is made: this takes about a millisecond
        raw_s, deviation = _summary(first_tokens_s)
        spread = hypot(MIN_SPREAD, self.model.relative_error, deviation)
        band = self.calibration.band(raw_s, spread)
        end_s = _summary(ends_s)[0] if to_end else None
        return LatencyPrediction(sequence_id, now_s, band, raw_s, spread, end_s)

    def refresh_waiting_time(self, manager: WorkloadManager, now_s: float) -> Iterator[None]:
        """Correct the prediction of waiting times. Other tasks may run wherever it yields."""
        if manager.num_in_flight == len(self._in_flight):
            yield from self.waiting_time.refresh(manager, now_s, self._expected_ends(now_s))

    def _expected_ends(self, now_s: float) -> list[float]:
        """When each step in flight is expected to be done. An overdue step is expected immediately."""
        ends_s: list[float] = []
        done_s = self._last_done_s
        for num_ahead, step in enumerate(self._in_flight):
            done_s = max(now_s, max(step.planned_s, done_s) + self.model.seconds_of(step.work, num_ahead))
            ends_s.append(done_s)
        return ends_s

    def _idle_s(self, now_s: float) -> float:
        """How long the worker has been idle; 0 if a step is in flight."""
        return 0.0 if self._in_flight else now_s - self._last_done_s


def _summary(seconds: list[float]) -> tuple[float, float]:
    """Return the geometric mean of times, and the standard deviation of their logarithm."""
    logs = [log(max(each, Calibration.MIN_S)) for each in seconds]
    mean = sum(logs) / len(logs)
    return exp(mean), (sum((each - mean) ** 2 for each in logs) / (len(logs) - 1)) ** 0.5
