"""Claims about the worker's main loop: the order in which it launches steps and answers them."""

from __future__ import annotations

import threading

from servekit.protocol.framing import MessageReceiver, MessageSender, make_pipe
from servekit.protocol.messages import (
    FromWorker,
    Heartbeat,
    Profiled,
    Shutdown,
    StepFailed,
    StepPlan,
    StepResult,
    StopProfile,
    ToWorker,
)
from workers.model_worker import ModelWorker
from workers.runner.interface import OutOfMemory, Pending

TIMEOUT_S = 30.0


class FakeRunner:
    """Records launches and finishes; a step is complete once `allowed` is released for it."""

    def __init__(self, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.events: list[str] = []
        self.lacks_memory = False
        self.allowed = threading.Semaphore(0)
        self._changed = threading.Condition()

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        if self.lacks_memory:
            raise OutOfMemory("it does not fit")
        with self._changed:
            self.events.append(f"launch {plan.step_id}")
            self._changed.notify_all()

        def finish() -> StepResult:
            assert self.allowed.acquire(timeout=TIMEOUT_S)
            self.events.append(f"finish {plan.step_id}")
            return StepResult(plan.epoch, plan.step_id, (), 0.0)

        return Pending(self._is_one_done, finish)

    def _is_one_done(self) -> bool:
        is_one = self.allowed.acquire(blocking=False)
        if is_one:
            self.allowed.release()
        return is_one

    def wait_for(self, event: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, TIMEOUT_S), self.events


class Manager:
    """The other ends of the worker's pipes."""

    def __init__(self, runner: FakeRunner) -> None:
        task_reader, task_writer = make_pipe()
        result_reader, result_writer = make_pipe()
        self.tasks = MessageSender[ToWorker](task_writer)
        self._results = MessageReceiver[FromWorker](result_reader, FromWorker)
        self._worker = ModelWorker(
            MessageReceiver[ToWorker](task_reader, ToWorker), MessageSender[FromWorker](result_writer)
        )
        self._worker._runner = runner
        self._thread = threading.Thread(target=self._worker.run)

    def start(self) -> None:
        self._thread.start()

    def answer(self) -> FromWorker:
        while isinstance(message := self._results.receive(), Heartbeat):
            pass
        return message

    def end(self) -> None:
        self.tasks.send(Shutdown())
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def plan(step_id: int) -> StepPlan:
    return StepPlan(0, step_id, (), ())


def test_plan_that_arrives_during_a_step_is_launched_at_once() -> None:
    """No step completes before it is allowed to, so a worker that waited for one would not launch the next."""
    runner = FakeRunner(runs_ahead=True)
    manager = Manager(runner)
    manager.start()
    manager.tasks.send(plan(0))
    runner.wait_for("launch 0")
    for step_id in range(1, 5):
        manager.tasks.send(plan(step_id))
        runner.wait_for(f"launch {step_id}")  # the device has two steps now, and neither is complete
        runner.allowed.release()
        answer = manager.answer()
        assert isinstance(answer, StepResult) and answer.step_id == step_id - 1
    assert runner.events[:4] == ["launch 0", "launch 1", "finish 0", "launch 2"]
    runner.allowed.release()
    assert isinstance(manager.answer(), StepResult)
    manager.end()


def test_device_without_a_queue_executes_one_step_after_the_other() -> None:
    runner = FakeRunner(runs_ahead=False)
    manager = Manager(runner)
    for step_id in range(3):
        manager.tasks.send(plan(step_id))
        runner.allowed.release()
    manager.start()
    answers = [manager.answer() for _ in range(3)]
    assert [answer.step_id for answer in answers if isinstance(answer, StepResult)] == [0, 1, 2]
    assert runner.events == ["launch 0", "finish 0", "launch 1", "finish 1", "launch 2", "finish 2"]
    manager.end()


def test_other_messages_wait_for_the_steps_before_them() -> None:
    runner = FakeRunner(runs_ahead=True)
    manager = Manager(runner)
    for step_id in range(2):
        manager.tasks.send(plan(step_id))
        runner.allowed.release()
    manager.tasks.send(StopProfile())
    manager.start()
    assert [type(manager.answer()) for _ in range(3)] == [StepResult, StepResult, Profiled]
    manager.end()


def test_last_step_is_answered_without_another_message() -> None:
    runner = FakeRunner(runs_ahead=True)
    manager = Manager(runner)
    manager.start()
    for step_id in range(3):
        manager.tasks.send(plan(step_id))
        runner.allowed.release()
        answer = manager.answer()
        assert isinstance(answer, StepResult) and answer.step_id == step_id
    manager.end()


def test_out_of_memory_is_answered_in_order_and_fails_later_steps() -> None:
    runner = FakeRunner(runs_ahead=True)
    manager = Manager(runner)
    manager.start()
    manager.tasks.send(plan(0))
    runner.allowed.release()
    assert isinstance(manager.answer(), StepResult)
    runner.lacks_memory = True
    manager.tasks.send(plan(1))
    manager.tasks.send(plan(2))
    answers = [manager.answer(), manager.answer()]
    assert [(type(answer), answer.step_id) for answer in answers] == [(StepFailed, 1), (StepFailed, 2)]  # type: ignore[union-attr]
    manager.end()
