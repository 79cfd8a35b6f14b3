"""A process that speaks a worker's protocol, computes nothing, and misbehaves as it is told."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time

from servekit.messages import (
    FromWorker,
    Heartbeat,
    Loading,
    ModelInfo,
    Profiled,
    Shutdown,
    StartProfile,
    StepPlan,
    StepResult,
    StopProfile,
    ToWorker,
    WorkerReady,
)
from servekit.processes import leave_traces
from servekit.queues import MessageReceiver, MessageSender, adopt_reader, adopt_writer

READY = WorkerReady(ModelInfo("Stand-in", 1, 10, 100, (), 1.0, 0, 1.0), "cpu", "float32", 1, 1, 0.0)

SLOWLY_S = 2.5


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--task-fd", "--result-fd", "--parent-pid"):
        parser.add_argument(name, type=int)
    parser.add_argument("does")
    told = parser.parse_args()
    leave_traces()
    tasks = MessageReceiver[ToWorker](adopt_reader(told.task_fd), ToWorker)
    results = MessageSender[FromWorker](adopt_writer(told.result_fd))

    def beat() -> None:
        while True:
            time.sleep(0.2)
            results.send(Heartbeat())

    tasks.receive()
    results.send(Loading("pretending"))
    if told.does == "stops while it loads":
        os.kill(os.getpid(), signal.SIGSTOP)
    results.send(READY)
    if told.does not in ("silent", "profiles slowly"):
        threading.Thread(target=beat, daemon=True).start()
    while not isinstance(plan := tasks.receive(), Shutdown):
        if isinstance(plan, StartProfile | StopProfile):
            if told.does == "profiles slowly":
                time.sleep(SLOWLY_S)
            results.send(Profiled(num_steps=plan.max_steps if isinstance(plan, StartProfile) else 0))
            continue
        assert isinstance(plan, StepPlan)
        if told.does == "garbage":
            os.write(told.result_fd, bytes([0, 0, 0, 4, 1, 2, 3, 4]))
        elif told.does == "torn":
            os.write(told.result_fd, bytes([0, 0, 1, 0, 1, 2, 3, 4]))
            os._exit(0)
        elif told.does == "child":  # one that holds the queue open after our death
            if os.fork() == 0:
                time.sleep(2)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif told.does == "hangs":
            time.sleep(60)
        elif told.does == "chatters":
            for number in range(1000):
                results.send(StepResult(0, number, (), 0.0))
        elif told.does == "answers":
            results.send(Profiled())
        else:
            results.send(StepResult(plan.epoch, plan.step_id, (7,), 0.0))


if __name__ == "__main__":
    main()
