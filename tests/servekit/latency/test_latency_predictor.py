"""Claims about predictions for a manager whose steps take exactly what they took before."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.latency import latency_predictor, waiting_time
from servekit.latency.latency_predictor import LatencyPredictor
from servekit.latency.roll_forward import RollForward
from servekit.latency.waiting_time import WaitingTime
from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason
from servekit.scheduler.workload_manager import WorkloadManager

STEP_S = 0.01


class Service:
    """A manager, whose steps all take STEP_S, and its predictor. Answers are cut at max_tokens.

    After a pause, the first step takes `resume_s` more.
    """

    def __init__(self, max_num_seqs: int = 2, max_steps_in_flight: int = 2, resume_s: float = 0.0) -> None:
        self.manager = WorkloadManager(
            SchedulerConfig(
                num_blocks=64,
                block_size=16,
                max_model_len=512,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=64,
                max_steps_in_flight=max_steps_in_flight,
            )
        )
        self.predictor = LatencyPredictor()
        self.now_s = self.done_s = 0.0
        self.resume_s = resume_s
        self.first_tokens_s: dict[int, float] = {}
        self.ends_s: dict[int, float] = {}
        self._in_flight: deque[tuple[float, StepPlan]] = deque()
        self._num_added = 0

    def add(self, prompt_length: int = 10, max_tokens: int = 5, deadline_s: float = float("inf")) -> int:
        self._num_added += 1
        self.manager.add(
            AddSequence(
                sequence_id=self._num_added,
                prompt_token_ids=array("i", range(self._num_added, self._num_added + prompt_length)),
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                arrival_s=self.now_s,
                deadline_s=deadline_s,
            )
        )
        return self._num_added

    def plan(self) -> None:
        self.manager.expire(self.now_s)
        while (plan := self.manager.plan(self.now_s)) is not None:
            began_s = self._in_flight[-1][0] if self._in_flight else self.now_s
            resume_s = self.resume_s if not self._in_flight and self.now_s > self.done_s else 0.0
            self._in_flight.append((began_s + STEP_S + resume_s, plan))
            self.predictor.planned(self.manager, plan, self.now_s)

    def step(self) -> bool:
        """Play one step; False if there is nothing to do."""
        self.plan()
        if not self._in_flight:
            return False
        self.now_s, plan = self._in_flight.popleft()
        self.done_s = self.now_s
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        result = StepResult(plan.epoch, plan.step_id, (7,) * num_sampled, 0.0)
        tokens = self.manager.commit(result, self.now_s)
        self.predictor.committed(self.manager, tokens, self.now_s)
        for token in tokens:
            self.first_tokens_s.setdefault(token.sequence.sequence_id, self.now_s)
            if token.finish_reason is not None:
                self.ends_s[token.sequence.sequence_id] = self.now_s
        return True

    def run(self) -> None:
        while self.step():
            pass


@pytest.fixture
def service() -> Service:
    """A service that has served some requests."""
    service = Service()
    for _ in range(4):
        service.add()
    service.run()
    return service


@pytest.mark.parametrize("num_others", [0, 1, 2, 5])
def test_first_token_and_end_are_predicted_exactly_if_nothing_is_left_to_chance(
    service: Service, num_others: int
) -> None:
    for number in range(num_others):
        service.add(10 + 30 * number, 5 + number)
        service.step()
    service.plan()
    wanted = service.add(100, 7)
    prediction = service.predictor.predict(service.manager, wanted, service.now_s, 1000, to_end=True)
    assert prediction is not None
    service.run()
    measured_s = service.first_tokens_s[wanted] - prediction.predicted_s
    assert prediction.raw_s == pytest.approx(measured_s, rel=0.01)
    assert prediction.end_s == pytest.approx(service.ends_s[wanted] - prediction.predicted_s, rel=0.01)
    assert prediction.first_token.low_s < measured_s < prediction.first_token.high_s
    service.predictor.measured(prediction, service.first_tokens_s[wanted])


def test_a_request_that_comes_to_an_idle_worker_waits_until_it_resumes() -> None:
    service = Service(resume_s=5e-3)
    for _ in range(30):
        service.add()
        service.run()
        service.now_s += 0.5
    wanted = service.add()
    prediction = service.predictor.predict(service.manager, wanted, service.now_s, 1000)
    assert prediction is not None and prediction.raw_s == pytest.approx(STEP_S + 5e-3, rel=0.05)
    service.plan()
    second = service.add()  # comes while the first step is in flight
    prediction = service.predictor.predict(service.manager, second, service.now_s, 1000)
    service.run()
    assert prediction is not None
    assert prediction.raw_s == pytest.approx(service.first_tokens_s[second] - prediction.predicted_s, rel=0.05)


def test_only_a_predicted_end_is_compared_with_the_end_that_came(service: Service) -> None:
    wanted = service.add(20, 7)
    to_end = service.predictor.predict(service.manager, wanted, service.now_s, 1000, to_end=True)
    to_first_token = service.predictor.predict(service.manager, wanted, service.now_s, 1000)
    assert to_end is not None and to_end.end_s is not None
    assert to_first_token is not None and to_first_token.end_s is None
    service.predictor.ended(to_first_token, 1000.0)
    assert service.predictor.quality.end_error == 0.0
    service.predictor.ended(to_end, to_end.predicted_s + 2 * to_end.end_s)
    assert service.predictor.quality.end_error == pytest.approx(0.5)


def test_a_prediction_changes_nothing(service: Service) -> None:
    for _ in range(5):
        wanted = service.add()
    service.plan()
    before = repr([service.manager.find(each) for each in service.manager.sequence_ids])
    assert service.predictor.predict(service.manager, wanted, service.now_s, 1000) is not None
    assert repr([service.manager.find(each) for each in service.manager.sequence_ids]) == before
    service.manager.check()


def test_nothing_is_predicted_before_a_step_was_measured() -> None:
    service = Service()
    wanted = service.add()
    assert service.predictor.predict(service.manager, wanted, 0.0, 1000) is None


def test_nothing_is_predicted_beyond_the_steps_that_may_be_played(service: Service) -> None:
    for _ in range(20):
        wanted = service.add(max_tokens=20)
    assert service.predictor.predict(service.manager, wanted, service.now_s, 10) is None


def test_a_sequence_whose_deadline_comes_first_has_no_first_token(service: Service) -> None:
    service.add(max_tokens=50)
    service.add(max_tokens=50)
    service.step()
    wanted = service.add(deadline_s=service.now_s + 0.1)
    assert service.predictor.predict(service.manager, wanted, service.now_s, 1000) is None


def test_steps_of_a_worker_that_was_lost_teach_nothing(service: Service) -> None:
    wanted = service.add()
    service.plan()
    num_steps = service.predictor.model.num_steps
    service.manager.restart()
    service._in_flight.clear()
    assert service.predictor.predict(service.manager, wanted, service.now_s, 1000) is None
    service.now_s += 60.0
    service.run()
    assert service.predictor.model.num_steps > num_steps
    assert service.predictor.model.relative_error < 0.01


def test_a_predictor_that_does_not_learn_predicts_with_what_it_took_over(service: Service) -> None:
    learned, service.predictor = service.predictor, LatencyPredictor(learns=False)
    service.predictor.take_over(learned)
    num_steps = learned.model.num_steps
    wanted = service.add()
    prediction = service.predictor.predict(service.manager, wanted, service.now_s, 1000)
    assert prediction is not None
    service.run()
    service.predictor.measured(prediction, service.first_tokens_s[wanted])
    assert learned.model.num_steps == num_steps


def test_answers_that_are_ended_by_clients_teach_no_length(service: Service) -> None:
    mean = service.predictor.lengths.mean
    wanted = service.add(max_tokens=100)
    service.step()
    service.manager.finish(wanted, FinishReason.ABORT)
    service.run()
    assert service.predictor.lengths.mean == mean


def test_results_that_are_applied_together_teach_no_step_time(service: Service) -> None:
    service.add(max_tokens=20)
    service.step()
    service.plan()
    manager, num_steps = service.manager, service.predictor.model.num_steps
    (_, first), (_, second) = service._in_flight
    service._in_flight.clear()
    for plan in (second, first):
        tokens = manager.commit(StepResult(plan.epoch, plan.step_id, (7,), 0.0), service.now_s)
        service.predictor.committed(manager, tokens, service.now_s)
    assert manager.num_in_flight == 0 and service.predictor.model.num_steps == num_steps
    service.run()
    assert service.predictor.model.num_steps > num_steps


@pytest.mark.parametrize("learns", [True, False])
def test_a_step_that_loads_blocks_teaches_no_step_time(service: Service, learns: bool) -> None:
    model = service.predictor.model
    before = model.num_steps, model.drift
    service.predictor.learns = learns
    service.add(max_tokens=1)
    plan = service.manager.plan(service.now_s)
    assert plan is not None
    service.predictor.planned(service.manager, replace(plan, loads=((bytes(16), 0),)), service.now_s)
    tokens = service.manager.commit(StepResult(plan.epoch, plan.step_id, (7,), 0.0), service.now_s + 5.0)
    service.predictor.committed(service.manager, tokens, service.now_s + 5.0)
    assert tokens and (model.num_steps, model.drift) == before


def test_a_step_that_takes_no_time_breaks_nothing(service: Service) -> None:
    service.predictor.learns = False
    service.add(max_tokens=1)
    service.plan()
    _, plan = service._in_flight.popleft()
    tokens = service.manager.commit(StepResult(plan.epoch, plan.step_id, (7,), 0.0), service.now_s)
    service.predictor.committed(service.manager, tokens, service.now_s)
    assert tokens


def test_the_waiting_time_of_a_line_that_is_too_long_to_be_played_is_that_of_the_formula(service: Service) -> None:
    for _ in range(WaitingTime.MAX_SEQUENCES + 1):
        service.add(max_tokens=5)
    assert not list(service.predictor.refresh_waiting_time(service.manager, service.now_s))
    assert service.predictor.waiting_time.correction == 1.0


@pytest.mark.parametrize("num_waiting", [4, 30])
def test_the_waiting_time_of_a_line_is_predicted(service: Service, num_waiting: int) -> None:
    for _ in range(2 + num_waiting):
        service.add(max_tokens=5)
    service.step()
    manager, waiting_time = service.manager, service.predictor.waiting_time
    for _ in service.predictor.refresh_waiting_time(manager, service.now_s):
        pass
    for _ in service.predictor.refresh_waiting_time(manager, service.now_s):
        pass
    predicted_s = waiting_time.seconds(manager, manager.num_waiting)
    began_s, last = service.now_s, service.add(max_tokens=5)
    service.run()
    assert predicted_s == pytest.approx(service.first_tokens_s[last] - began_s, rel=0.35)


def test_behind_short_prompts_the_waiting_time_is_as_if_there_were_no_others(service: Service) -> None:
    for _ in range(8):
        service.add(max_tokens=5)
    manager, waiting_time = service.manager, service.predictor.waiting_time
    without_others_s = waiting_time.seconds(manager, 8)
    for _ in range(40):
        service.add(prompt_length=400, max_tokens=5)
    assert waiting_time.seconds(manager, 8, manager.queued.not_longer(10)) == pytest.approx(without_others_s, rel=0.1)
    assert waiting_time.seconds(manager, 48, manager.queued.not_longer(400)) > 3 * without_others_s > 0


@pytest.mark.parametrize("predicts", ["a request", "the waiting time"])
def test_a_slice_copies_the_manager_or_plays_one_step(
    service: Service, monkeypatch: pytest.MonkeyPatch, predicts: str
) -> None:
    done: list[str] = []

    class Observed(RollForward):
        def __init__(self, *arguments: Any) -> None:
            done.append("copy")
            super().__init__(*arguments)

        def step(self) -> bool:
            done.append("step")
            return super().step()

    monkeypatch.setattr(latency_predictor, "RollForward", Observed)
    monkeypatch.setattr(waiting_time, "RollForward", Observed)
    newest = [service.add(max_tokens=5) for _ in range(32)][-1]
    service.step()
    predictor, manager, now_s = service.predictor, service.manager, service.now_s
    slices: Iterator[None] = predictor.refresh_waiting_time(manager, now_s)
    if predicts == "a request":
        slices = predictor.predict_in_slices(manager, newest, now_s, max_steps=1000, to_end=True)
    num_before = 0
    for _ in slices:
        assert len(done) <= num_before + 1, f"{done[num_before:]} in one slice"
        num_before = len(done)
    assert {*done} == {"copy", "step"}


def test_no_waiting_time_is_predicted_where_nothing_is_known() -> None:
    service = Service()
    for _ in range(50):
        service.add(max_tokens=50)
    assert service.predictor.waiting_time.seconds(service.manager, 50) == 0.0
    assert not list(service.predictor.refresh_waiting_time(service.manager, 0.0))
    service.step()
    assert service.predictor.waiting_time.seconds(service.manager, 50) == 0.0  # no answer has ended


def test_a_sequence_that_finds_a_free_slot_does_not_wait(service: Service) -> None:
    assert service.predictor.waiting_time.seconds(service.manager, 0) == 0.0


def test_those_that_start_later_are_not_waited_for(service: Service) -> None:
    for _ in range(50):
        service.add(prompt_length=200)
    service.step()
    manager, waiting_time = service.manager, service.predictor.waiting_time
    assert waiting_time.seconds(manager, 1) < 0.2 * waiting_time.seconds(manager, manager.num_waiting)


def test_a_long_prompt_that_waits_does_not_hide_how_many_sequences_fit() -> None:
    service = Service(max_num_seqs=32)
    for _ in range(32):
        service.add()
    service.run()
    for _ in range(20):
        service.add(max_tokens=20)
    for _ in range(8):
        service.step()
    assert service.manager.num_running == 20
    short_s = service.predictor.waiting_time.seconds(service.manager, 1)
    service.add(prompt_length=400)
    assert service.manager.num_waiting == 1
    assert service.predictor.waiting_time.seconds(service.manager, 1) < short_s + 10 * STEP_S


def test_a_correction_fades_where_nothing_is_played(service: Service) -> None:
    waiting_time = service.predictor.waiting_time
    waiting_time.correction = 3.0
    for _ in range(50):
        assert not list(service.predictor.refresh_waiting_time(service.manager, service.now_s))
    assert waiting_time.correction == pytest.approx(1.0, abs=0.05)


def test_nothing_is_corrected_while_a_step_in_flight_is_not_known(service: Service) -> None:
    for _ in range(12):
        service.add()
    service.step()
    assert service.manager.num_in_flight
    assert not list(LatencyPredictor().refresh_waiting_time(service.manager, service.now_s))


def test_a_line_of_which_too_few_start_corrects_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingTime, "MAX_STEPS", 1)
    for _ in range(12):
        service.add()
    service.step()
    assert list(service.predictor.refresh_waiting_time(service.manager, service.now_s))
    assert service.predictor.waiting_time.correction == 1.0


def test_a_replica_that_has_served_nothing_is_judged_by_what_others_taught(service: Service) -> None:
    fresh = Service()
    assert fresh.manager.num_prompt_tokens == 0
    assert service.predictor.waiting_time.seconds(fresh.manager, 10) > 0.0
