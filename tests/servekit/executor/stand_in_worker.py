"""A process that follows the worker protocol and computes nothing. Its argument selects a kind of misbehaviour."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time

from msgspec.structs import replace

from servekit.protocol.child_process import dump_stacks_on_crash
from servekit.protocol.framing import MessageReceiver, MessageSender, adopt_reader, adopt_writer
from servekit.protocol.messages import (
    BlocksListed,
    FromWorker,
    Heartbeat,
    ListBlocks,
    Loading,
    LoadModel,
    ModelInfo,
    Profiled,
    RankInfo,
    Shutdown,
    StartProfile,
    StepAcknowledged,
    StepFailed,
    StepPlan,
    StepResult,
    StopProfile,
    ToWorker,
    TransferReport,
    WorkerFailed,
    WorkerReady,
)

READY = WorkerReady(ModelInfo("Stand-in", 1, 10, 100, (), 1.0, 0, 1.0), "cpu", "float32", 1, 1, 0.0)

SLOW_PROFILE_S = 1.2
LOADED = TransferReport(failed_loads=(2,), dropped_keys=(b"a" * 16, b"b" * 16), num_received=4, block_bytes=100)
LOADED_LESS = TransferReport(failed_loads=(0, 2), dropped_keys=(b"b" * 16, b"c" * 16), num_received=3, block_bytes=50)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--task-fd", "--result-fd", "--parent-pid"):
        parser.add_argument(name, type=int)
    parser.add_argument("--cpus")
    parser.add_argument("behaviour")
    arguments = parser.parse_args()
    behaviour = arguments.behaviour
    dump_stacks_on_crash()
    tasks = MessageReceiver[ToWorker](adopt_reader(arguments.task_fd), ToWorker)
    results = MessageSender[FromWorker](adopt_writer(arguments.result_fd))

    def beat() -> None:
        while True:
            time.sleep(0.05)
            results.send(Heartbeat())

    load = tasks.receive()
    if behaviour.startswith("ranks: "):  # which do different things
        assert isinstance(load, LoadModel)
        behaviour = behaviour.removeprefix("ranks: ").split(", ")[load.rank]
    results.send(Loading("pretending"))
    if behaviour == "stops while it loads":
        os.kill(os.getpid(), signal.SIGSTOP)
    ready = replace(READY, num_blocks=2) if behaviour == "has other blocks" else READY
    results.send(ready if arguments.cpus is None else replace(ready, ranks=(RankInfo("cpu", arguments.cpus),)))
    is_silent = behaviour in ("sends no heartbeats", "profiles slowly", "trickles")
    if not is_silent and not behaviour.startswith("closes its pipe"):
        threading.Thread(target=beat, daemon=True).start()
    while not isinstance(plan := tasks.receive(), Shutdown):
        if isinstance(plan, StartProfile | StopProfile):
            if behaviour == "profiles slowly":
                time.sleep(SLOW_PROFILE_S)
            results.send(Profiled(num_steps=plan.max_steps if isinstance(plan, StartProfile) else 0))
            continue
        if isinstance(plan, ListBlocks):
            results.send(BlocksListed((b"k" * 16,) if plan.start == 0 else ()))
            continue
        assert isinstance(plan, StepPlan)
        if behaviour == "sends garbage":
            os.write(arguments.result_fd, bytes([0, 0, 0, 4, 1, 2, 3, 4]))
        elif behaviour == "exits within a message":
            os.write(arguments.result_fd, bytes([0, 0, 1, 0, 1, 2, 3, 4]))
            os._exit(0)
        elif behaviour == "leaves a child":  # which holds the result pipe open
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif behaviour.startswith("closes its pipe"):
            os.close(arguments.result_fd)
            time.sleep(0.5)
            if behaviour == "closes its pipe before it is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        elif behaviour == "hangs":
            time.sleep(60)
        elif behaviour == "fails":
            results.send(WorkerFailed("the model worker failed: RuntimeError: connection closed by peer"))
        elif behaviour == "is a group without memory":
            results.send(WorkerFailed("rank 1 of the model worker ran out of memory", is_out_of_memory=True))
        elif behaviour == "trickles":  # bytes of a frame that never ends
            os.write(arguments.result_fd, bytes([0, 1, 0, 0]))
            while True:
                os.write(arguments.result_fd, b"x")
                time.sleep(0.01)
        elif behaviour == "floods":
            for number in range(1000):
                results.send(StepResult(0, number, (), 0.0))
        elif behaviour == "acknowledges":
            results.send(StepAcknowledged.of(StepResult(plan.epoch, plan.step_id, (7,), 0.0)))
        elif behaviour == "loads":
            results.send(StepResult(plan.epoch, plan.step_id, (7,), 0.0, transfers=LOADED))
        elif behaviour == "acknowledges and loads less":
            result = StepResult(plan.epoch, plan.step_id, (7,), 0.0, transfers=LOADED_LESS)
            results.send(StepAcknowledged.of(result))
        elif behaviour == "acknowledges other tokens":
            results.send(StepAcknowledged.of(StepResult(plan.epoch, plan.step_id, (8,), 0.0)))
        elif behaviour == "runs out of memory":
            results.send(StepFailed(plan.epoch, plan.step_id, "no memory"))
        elif behaviour == "answers no request":
            results.send(Profiled())
        else:
            results.send(StepResult(plan.epoch, plan.step_id, (7,), 0.0))


if __name__ == "__main__":
    main()
