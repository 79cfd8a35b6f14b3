"""What the workload manager itself costs: `plan` plus `commit` for a step of decodes, by running sequences.

No worker, no queues, no model: answers are made up. Prefix caching is on and finds nothing, which is its worst case.

    python benchmarks/manager.py [--steps 400]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

from servekit.messages import StepResult
from servekit.sampling_params import SamplingParams
from servekit.sequence import Sequence
from servekit.workload_manager import SchedulerConfig, WorkloadManager

PROMPT_LENGTH = 100
BLOCK_SIZE = 16


def full_house(num_sequences: int, num_steps: int) -> WorkloadManager:
    """A manager whose sequences all run, and have room to run for `num_steps`."""
    blocks_each = -(-(PROMPT_LENGTH + num_steps + 2) // BLOCK_SIZE) + 1
    manager = WorkloadManager(
        SchedulerConfig(
            num_blocks=num_sequences * blocks_each,
            block_size=BLOCK_SIZE,
            max_model_len=2**20,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=num_sequences * PROMPT_LENGTH,
        )
    )
    sampling = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    for sequence_id in range(num_sequences):
        manager.add(Sequence(sequence_id, [sequence_id] * PROMPT_LENGTH, sampling))
    step(manager)
    return manager


def step(manager: WorkloadManager) -> float:
    """Seconds that one plan and one commit take."""
    started = time.perf_counter()
    plan = manager.plan(0.0)
    planned = time.perf_counter()
    assert plan is not None
    result = StepResult(plan.epoch, plan.step_id, (7,) * len(plan.rows), 0.0)
    answered = time.perf_counter()
    manager.commit(result, 0.0)
    return planned - started + time.perf_counter() - answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    num_steps = parser.parse_args().steps
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {num_steps} steps\n")
    print("| running sequences | median µs | 99th percentile µs | µs per sequence |")
    print("|---:|---:|---:|---:|")
    for num_sequences in (1, 16, 64, 256, 1024):
        manager = full_house(num_sequences, num_steps)
        times_us = sorted(step(manager) * 1e6 for _ in range(num_steps))
        median, tail = statistics.median(times_us), times_us[int(0.99 * num_steps)]
        print(f"| {num_sequences:,} | {median:,.0f} | {tail:,.0f} | {median / num_sequences:.2f} |", flush=True)


if __name__ == "__main__":
    main()
