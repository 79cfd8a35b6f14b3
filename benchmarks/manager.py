"""Measure the workload manager: `plan` plus `commit` by running sequences, and the prefix cache's part of it.

There is no worker, no queue and no model; results are made up. The prefix cache never finds a block: its worst case.

    python benchmarks/manager.py [--steps 400]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

from benchmarks.progress import progress, tell
from servekit.protocol.messages import StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, Commit, Plan
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager

PROMPT_LENGTH = 100
BLOCK_SIZE = 16
CHUNK = 2048


def make_manager(num_sequences: int, positions_each: int, budget: int, enable_prefix_caching: bool) -> WorkloadManager:
    return WorkloadManager(
        SchedulerConfig(
            num_blocks=num_sequences * (-(-positions_each // BLOCK_SIZE) + 2),
            block_size=BLOCK_SIZE,
            max_model_len=2**20,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=budget,
            enable_prefix_caching=enable_prefix_caching,
            max_admissions_per_step=num_sequences,
        )
    )


def decode_times_us(num_sequences: int, num_steps: int, enable_prefix_caching: bool = True) -> list[float]:
    """Each step's time while `num_sequences` sequences run, all past their prompts."""
    budget = num_sequences * PROMPT_LENGTH
    manager = make_manager(num_sequences, PROMPT_LENGTH + num_steps + 2, budget, enable_prefix_caching)
    sampling = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    for sequence_id in range(num_sequences):
        # Prompts of different lengths, so that they do not all fill a block in the same step.
        length = PROMPT_LENGTH - sequence_id % BLOCK_SIZE
        manager.add(AddSequence(sequence_id=sequence_id, prompt_token_ids=(sequence_id,) * length, sampling=sampling))
    step(manager)
    return [step(manager) * 1e6 for _ in range(num_steps)]


def churn_times_us(num_sequences: int, num_steps: int, positions_each: int) -> list[float]:
    """Each step's time while sequences of 1 to 64 tokens come and go, behind a long queue.

    80 positions are enough for each sequence. With fewer, admission depends on the future peak, which takes time.
    """
    manager = make_manager(num_sequences, positions_each, 16 * num_sequences, enable_prefix_caching=True)
    next_id = 0
    times_us = []
    for _ in range(num_steps):
        while manager.num_waiting < num_sequences:
            sampling = SamplingParams(max_tokens=1 + next_id * 37 % 64, ignore_eos=True)
            manager.add(AddSequence(sequence_id=next_id, prompt_token_ids=(next_id,) * 8, sampling=sampling))
            next_id += 1
        times_us.append(step(manager) * 1e6)
    return times_us[num_steps // 4 :]


def prefill_times_us(num_steps: int, enable_prefix_caching: bool) -> list[float]:
    """Each step's time when it is one new prompt of CHUNK tokens."""
    manager = make_manager(1, CHUNK, CHUNK, enable_prefix_caching)
    times_us = []
    for sequence_id in range(num_steps):
        command = AddSequence(
            sequence_id=sequence_id,
            prompt_token_ids=(sequence_id,) * CHUNK,
            sampling=SamplingParams(max_tokens=1),
        )
        started = time.perf_counter()
        manager.apply(command)  # hashes the prompt and looks it up
        added_s = time.perf_counter() - started
        times_us.append((added_s + step(manager)) * 1e6)
    return times_us


def step(manager: WorkloadManager) -> float:
    """Seconds that one plan and one commit take."""
    started = time.perf_counter()
    plan = manager.apply(Plan(0.0))
    planned = time.perf_counter()
    assert plan is not None
    result = StepResult(plan.epoch, plan.step_id, (7,) * len(plan.chunks), 0.0)
    answered = time.perf_counter()
    manager.apply(Commit(result, 0.0))
    return planned - started + time.perf_counter() - answered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    num_steps = parser.parse_args().steps
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {num_steps} steps\n")
    print(
        "| running sequences | median µs | p99 µs | µs per sequence | prefix cache's part, µs | churn, µs | tight, µs |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for num_sequences in progress((1, 16, 64, 256, 1024), "sizes", lambda number: f"{number:,} sequences"):
        times_us = sorted(decode_times_us(num_sequences, num_steps))
        without = statistics.mean(decode_times_us(num_sequences, num_steps, enable_prefix_caching=False))
        median, tail = statistics.median(times_us), times_us[int(0.99 * num_steps)]
        added = statistics.mean(times_us) - without
        rooms = (80, 16 if num_sequences > 1 else 80)
        churn, tight = (statistics.median(churn_times_us(num_sequences, num_steps, room)) for room in rooms)
        each = median / num_sequences
        tell(
            f"| {num_sequences:,} | {median:,.0f} | {tail:,.0f} | {each:.2f} | {added:,.0f} | "
            f"{churn:,.0f} | {tight:,.0f} |"
        )
    times_us, without_us = prefill_times_us(num_steps, True), prefill_times_us(num_steps, False)
    added = statistics.median(times_us) - statistics.median(without_us)
    median = statistics.median(times_us)
    print(
        f"\na new prompt of {CHUNK:,} tokens in one step: {median:,.0f} µs, {added:,.0f} of them for the prefix cache"
    )


if __name__ == "__main__":
    main()
