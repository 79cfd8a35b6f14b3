"""A workload manager with a simulated worker, small enough to reason about."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.service import RecklessPredictor
from servekit.simulation.worker import NaiveReference, SimulatedWorker

EOS = frozenset({39, 74})  # 2 % of the simulated vocabulary: answers end by themselves after about 50 tokens


def make_manager(is_reckless: bool = False, **changes: Any) -> WorkloadManager:
    limits = {"num_blocks": 64, "block_size": 4, "max_model_len": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    config = SchedulerConfig(eos_token_ids=EOS, **{**limits, **changes})
    manager = WorkloadManager(config, RecklessPredictor(config.block_size) if is_reckless else None)
    if config.max_drafts:
        # Otherwise there are no drafts before a step without prefill, and two trials.
        manager.draft_lengths.times.observe(1, 1.0)
        manager.draft_lengths.round_times.observe(1, 0.0)
        manager.draft_lengths.num_paying = 64
    return manager


def make_worker(manager: WorkloadManager) -> SimulatedWorker:
    config = manager.config
    return SimulatedWorker(config.num_blocks, config.block_size, config.max_num_batched_tokens)


def make_prompt(sequence_id: int, length: int) -> list[int]:
    """Return a prompt of `length` times the same token, which differs between most sequences."""
    return [random.Random(sequence_id).randrange(1000)] * length


def make_sequence(
    sequence_id: int, prompt_length: int = 5, max_tokens: int = 8, tenant: str = "", **sampling: Any
) -> Sequence:
    """A sequence that no manager knows."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Sequence(sequence_id, make_prompt(sequence_id, prompt_length), params, tenant=tenant, has_length_bound=False)


def add_prompt(
    manager: WorkloadManager, sequence_id: int, prompt: Iterable[int], sampling: SamplingParams, **fields: Any
) -> Sequence:
    return manager.add(
        AddSequence(sequence_id=sequence_id, prompt_token_ids=tuple(prompt), sampling=sampling, **fields)
    )


def add_sequence(
    manager: WorkloadManager, sequence_id: int, prompt_length: int = 5, max_tokens: int = 8, **sampling: Any
) -> Sequence:
    """Add a sequence with its own prompt, and without a length bound: it is admitted by a guess of its length."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return add_prompt(manager, sequence_id, make_prompt(sequence_id, prompt_length), params, has_length_bound=False)


def reference(sequence: Sequence) -> list[int]:
    """The answer as the naive reference computes it."""
    return NaiveReference(EOS).output(sequence.token_ids[: sequence.prompt_length], sequence.sampling)


def run(manager: WorkloadManager, worker: SimulatedWorker, max_steps: int = 100_000) -> None:
    """Drive to the end, at the manager's own depth, checking every law after every step."""
    plans = []
    while manager.has_work:
        while (plan := manager.plan(0.0)) is not None:
            manager.check()
            plans.append(plan)
        assert plans, "there is work, nothing is in flight, and no step was planned"
        manager.commit(worker.execute(plans.pop(0)), 0.0)
        manager.check()
        assert worker.num_steps < max_steps, "no progress"


def assert_idle(manager: WorkloadManager) -> None:
    """Nothing is left of any sequence."""
    assert not manager.has_work
    assert manager.kv_cache.pool.num_available == manager.config.num_blocks
    manager.check()
