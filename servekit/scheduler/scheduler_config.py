"""The scheduler's limits and its policy."""

from __future__ import annotations

from msgspec import Struct

from servekit.config import ServeConfig
from servekit.errors import ContextTooLong
from servekit.protocol.messages import WorkerReady
from servekit.scheduler.kv_connector import ReplicaRole

# Each admission takes 30 to 70 µs of `plan`, which holds the event loop. With more slots a step takes longer anyway,
# and all of them should be filled within a few steps.
MIN_ADMISSIONS_PER_STEP = 32
STEPS_TO_FILL_ALL_SLOTS = 8


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """The limits that every plan keeps, and how the scheduler chooses."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    max_steps_in_flight: int = 1
    pipeline_parallel_size: int = 1
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    itl_target_s: float | None = None
    max_preemptions: int = 4
    max_admissions_per_step: int = MIN_ADMISSIONS_PER_STEP
    max_drafts: int = 0  # maximum drafts of a sequence in a step; 0 turns speculative decoding off
    has_kv_connector: bool = False  # whether the worker stores blocks outside the pool
    prefetches_blocks: bool = False  # whether the worker reads blocks from its disk while their sequences wait
    role: ReplicaRole = ReplicaRole.BOTH  # which of them it stores there, and loads from there
    num_transfer_blocks: int = 0  # of those that it sends, how many can be loaded at the most; 0: it is not known

    @property
    def max_total_tokens(self) -> int:
        """The longest sequence that could run alone: prompt and output together.

        The last output token is never fed back, so it needs no KV position: hence the one more than the pool holds.
        """
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def check_fits(self, prompt_length: int, max_tokens: int) -> None:
        """Raise ContextTooLong for a sequence that can never be served, so that `plan` never meets one."""
        limit = self.max_total_tokens
        if prompt_length + max_tokens <= limit:
            return
        # Clients of other servers search for the first sentence and for the code at the end.
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_length + max_tokens} tokens ({prompt_length} in the prompt, {max_tokens} for the output). "
            "Please reduce the length of the prompt or max_tokens (context_length_exceeded)."
        )


def max_admissions_per_step(max_num_seqs: int) -> int:
    """How many sequences one step may admit."""
    return max(MIN_ADMISSIONS_PER_STEP, max_num_seqs // STEPS_TO_FILL_ALL_SLOTS)


def _max_steps_in_flight(config: ServeConfig) -> int:
    """In a pipeline each stage has a step, and another one waits for the first stage to be free."""
    num_stages = config.pipeline_parallel_size
    return max(config.max_steps_in_flight, num_stages + 1) if num_stages > 1 else config.max_steps_in_flight


def scheduler_config(
    config: ServeConfig, worker: WorkerReady, max_drafts: int = 0, role: ReplicaRole = ReplicaRole.BOTH
) -> SchedulerConfig:
    """The scheduler's configuration, from the operator's settings, what the worker reported and the chosen drafter."""
    return SchedulerConfig(
        num_blocks=worker.num_blocks,
        block_size=config.block_size,
        max_model_len=worker.model.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(worker.device),
        max_admissions_per_step=max_admissions_per_step(config.max_num_seqs),
        eos_token_ids=frozenset(worker.model.eos_token_ids),
        max_steps_in_flight=_max_steps_in_flight(config),
        pipeline_parallel_size=config.pipeline_parallel_size,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        itl_target_s=None if config.itl_target_ms is None else config.itl_target_ms / 1e3,
        max_drafts=max_drafts,
        has_kv_connector=config.kv_offload_memory_bytes is not None or role is not ReplicaRole.BOTH,
        prefetches_blocks=config.kv_offload_dir is not None,
        role=role,
        num_transfer_blocks=worker.num_transfer_blocks,
    )
