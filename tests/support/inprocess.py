"""Run the real workload manager and the real model runner in one process, without queues and an event loop."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import LoadModel, StepPlan, TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.protocol.speculative_config import SpeculativeConfig
from servekit.scheduler.commands import AddSequence, AnnounceBlocks
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.service import RecklessPredictor
from tests.support.drafters import varying_draft_lengths
from workers.kv_cache.kv_connector import KVConnector
from workers.kv_cache.pages import KVCache
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.runner.model_runner import ModelRunner
from workers.speculation.drafter import Drafter, LoadedDrafter


class InProcessEngine:
    """Add sequences, then step. Checks the manager's invariants after every step."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 64,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_steps_in_flight: int = 1,
        kv_cache_dtype: str = "auto",
        pipeline_parallel_size: int = 1,
        max_drafts: int = 0,
        drafter: Drafter | None = None,
        loaded_drafter: LoadedDrafter | None = None,
        make_connector: Callable[[KVCache], KVConnector] | None = None,
    ) -> None:
        """With `kv_cache_memory_bytes`, the cache has as many blocks as that holds.

        With a drafter, steps have up to `max_drafts` drafts for each sequence, whether they pay or not.
        """
        settings = LoadModel(
            model_path=loaded.model.name_or_path,
            dtype="auto",
            device="cpu",
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=None,
            num_kv_blocks=num_blocks if kv_cache_memory_bytes is None else None,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=0.9,
            kv_cache_dtype=kv_cache_dtype,
            speculative=SpeculativeConfig("ngram", max_drafts=max_drafts) if max_drafts else SpeculativeConfig(),
        )

        def make_runner(loaded: LoadedModel) -> ModelRunner:
            runner = ModelRunner(loaded, settings, loaded_drafter)
            runner.connector = None if make_connector is None else make_connector(runner.cache)
            return runner

        self._make_runner = make_runner
        self._loaded = loaded
        self.runner = self._make_runner(loaded)
        if drafter is not None:
            self.runner.speculate(drafter)
        self.manager = WorkloadManager(
            SchedulerConfig(
                num_blocks=self.runner.cache.num_blocks,
                block_size=block_size,
                max_model_len=loaded.info.max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                eos_token_ids=frozenset(loaded.info.eos_token_ids),
                max_steps_in_flight=max_steps_in_flight,
                pipeline_parallel_size=pipeline_parallel_size,
                max_drafts=max_drafts,
                has_kv_connector=make_connector is not None,
            ),
            RecklessPredictor(block_size),
        )
        if self.runner.drafter is not None:
            self.manager.draft_lengths = varying_draft_lengths(max_drafts)
        self.num_steps = 0
        self.num_copies = 0
        self.num_failures = 0  # of grammars, including those of sequences that have ended meanwhile
        self.logprobs: defaultdict[int, list[TokenLogprobs | None]] = defaultdict(list)  # by sequence, of its output
        self._in_flight: deque[StepPlan] = deque()
        self._next_id = 0

    def add(
        self,
        prompt: list[int],
        leader: Sequence | None = None,
        tenant: str = "",
        adapter: LoraAdapter | None = None,
        **sampling: Any,
    ) -> Sequence:
        """Add a sequence without a length bound: it is admitted optimistically, so small pools lead to preemption."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **sampling})
        command = AddSequence(
            sequence_id=self._next_id,
            prompt_token_ids=tuple(prompt),
            sampling=params,
            leader_id=None if leader is None else leader.sequence_id,
            has_length_bound=False,
            tenant=tenant,
            adapter=adapter,
        )
        self._next_id += 1
        return self.manager.add(command)

    def step(self) -> None:
        """Plan as many steps ahead as the manager allows, then execute the first one."""
        while (plan := self.manager.plan(0.0)) is not None:
            self._in_flight.append(plan)
        plan = self._in_flight.popleft()
        self.num_steps += 1
        self.num_copies += len(plan.copies)
        result = self.runner.execute(plan)
        self.num_failures += len(result.failures)
        for token in self.manager.commit(result, 0.0):
            self.logprobs[token.sequence.sequence_id].append(token.logprobs)
        self.manager.check()

    def run(self) -> None:
        while self.manager.has_work:
            self.step()

    def lose_worker(self, loaded: LoadedModel | None = None) -> None:
        """Go on with a new runner. Nothing is left of what the old one kept, and steps in flight have no result.

        `loaded` is the model that it has loaded; None: the same.
        """
        self._in_flight.clear()
        self.runner = self._make_runner(loaded or self._loaded)
        assert not self.manager.restart(), "a sequence was in flight in several crashes"
        self.manager.apply(AnnounceBlocks(self.runner.list_blocks(0).keys))


def load(path: Path, dtype: str = "float32", **settings: Any) -> LoadedModel:
    return ModelManager("cpu").load(path, dtype, None, **settings)
