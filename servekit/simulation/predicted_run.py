"""Simulate requests in virtual time with a latency predictor, and compare its predictions with the outcomes.

The predictor sees what it would see of a real worker: plans, results, and times with noise. It sees neither the lengths
of answers that have not ended nor the requests that are still to come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from msgspec import Struct

from servekit.latency.latency_predictor import LatencyPrediction, LatencyPredictor
from servekit.protocol.messages import StepPlan, StepResult
from servekit.scheduler.checkpoint import CONTINUES, ENDS, replay_prompt, replay_sampling
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager


class PredictedArrival(Struct, frozen=True):
    """A request. Its answer ends by itself after `num_output_tokens`, which only the simulation knows."""

    at_s: float
    prompt_length: int
    num_output_tokens: int
    max_tokens: int


class RequestOutcome(Struct, kw_only=True):
    """What came of a request."""

    arrival: PredictedArrival
    is_refused: bool = False
    prediction: LatencyPrediction | None = None
    first_token_s: float = inf
    end_s: float = inf

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s


class PredictedRun:
    """Plays requests on one replica."""

    MAX_ROLL_STEPS = 20_000
    REFRESH_INTERVAL_S = 1.0

    def __init__(
        self,
        config: SchedulerConfig,
        arrivals: Iterable[PredictedArrival],
        duration_s: Callable[[StepPlan], float],
        predictor: LatencyPredictor,
        *,
        predict_every: int = 1,
        admits: Callable[[WorkloadManager], bool] = lambda _: True,
    ) -> None:
        """`duration_s` gives the true time of a step, with its noise. `admits` is asked for each request.

        Of each `predict_every` requests one is predicted; with 0, none.
        """
        self.manager = WorkloadManager(config)
        self.outcomes: list[RequestOutcome] = []
        self._coming = deque(arrivals)
        self._duration_s = duration_s
        self._predictor = predictor
        self._predict_every = predict_every
        self._admits = admits
        self._now_s = 0.0
        self._refreshed_s = 0.0
        self._done_s: deque[float] = deque()  # when each step in flight is done

    def play(self) -> list[RequestOutcome]:
        """Play until every answer has ended, and return the outcomes in order of arrival."""
        while self._coming or self.manager.has_work:
            while self._coming and self._coming[0].at_s <= self._now_s:
                self._add(self._coming.popleft())
            self._plan()
            done_s = self._done_s[0] if self._done_s else inf
            arrival_s = self._coming[0].at_s if self._coming else inf
            self._now_s = min(done_s, arrival_s)
            if done_s <= arrival_s:
                self._commit()
            if self._now_s - self._refreshed_s >= self.REFRESH_INTERVAL_S:
                self._refreshed_s = self._now_s
                deque(self._predictor.refresh_waiting_time(self.manager, self._now_s), maxlen=0)
        return self.outcomes

    def _add(self, arrival: PredictedArrival) -> None:
        outcome = RequestOutcome(arrival=arrival)
        sequence_id = len(self.outcomes)
        self.outcomes.append(outcome)
        if not self._admits(self.manager):
            outcome.is_refused = True
            return
        self.manager.add(
            AddSequence(
                sequence_id=sequence_id,
                prompt_token_ids=replay_prompt(arrival.prompt_length),
                sampling=replay_sampling(arrival.max_tokens, False, False),
                arrival_s=arrival.at_s,
                has_length_bound=False,
            )
        )
        if self._predict_every and sequence_id % self._predict_every == 0:
            outcome.prediction = self._predictor.predict(self.manager, sequence_id, self._now_s, self.MAX_ROLL_STEPS)

    def _plan(self) -> None:
        while (plan := self.manager.plan(self._now_s)) is not None:
            self._predictor.planned(self.manager, plan, self._now_s)
            began_s = max(self._now_s, self._done_s[-1]) if self._done_s else self._now_s
            self._done_s.append(began_s + self._duration_s(plan))

    def _commit(self) -> None:
        self._done_s.popleft()
        manager, step = self.manager, self.manager.steps_in_flight[0]
        token_ids = tuple(
            ENDS
            if sequence.num_output_tokens + 1 >= self.outcomes[sequence.sequence_id].arrival.num_output_tokens
            else CONTINUES
            for sequence, _ in step.sampled
        )
        tokens = manager.commit(StepResult(manager.epoch, step.step_id, token_ids, 0.0), self._now_s)
        self._predictor.committed(manager, tokens, self._now_s)
        for token in tokens:
            outcome = self.outcomes[token.sequence.sequence_id]
            if token.sequence.num_output_tokens == 1:
                outcome.first_token_s = self._now_s
                if outcome.prediction is not None:
                    self._predictor.measured(outcome.prediction, self._now_s)
            if token.finish_reason is not None:
                outcome.end_s = self._now_s
