"""Turn a step plan into the tensors of one forward pass, every shape named.

The step is one flat row of tokens, whatever sequences they belong to: [num_tokens] ids and positions, no padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from workers.attention.interface import AttentionMetadata
from workers.device.transfer import to_device

Indices = NDArray[np.int64]
MIN_TEMPERATURE = 1e-5  # dividing by less overflows; at this temperature the result is greedy


class SamplingRow(msgspec.Struct, frozen=True):  # cheap to make: there is one for each row of each step
    """How one row of logits is sampled. A chunk with drafts has several, at consecutive positions."""

    sampling: SamplingParams
    position: int  # of the token that is to be chosen
    slot: int = 0
    num_outputs: int = 0  # tokens of the answer before this one

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the largest logit."""
        return self.sampling.temperature < MIN_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are excluded by their probability."""
        sampling = self.sampling
        return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0


# Sampling parameters that have no part in what a greedy row chooses, and nothing else to be computed from its logits.
_IRRELEVANT_IF_GREEDY = {
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "stop_token_ids"),
    *("include_stop", "ignore_eos", "skip_special_tokens", "visible_token_ids", "prediction"),
}
_DEFAULTS = msgspec.structs.asdict(SamplingParams(max_tokens=1))
_DEFAULTS_IF_GREEDY = {field: value for field, value in _DEFAULTS.items() if field not in _IRRELEVANT_IF_GREEDY}


def takes_likeliest(assignment: SlotAssignment) -> bool:
    """Return whether each token of the sequence is the largest logit, and nothing else is read from the logits."""
    sampling = assignment.sampling
    if sampling.temperature >= MIN_TEMPERATURE or assignment.grammar is not None:
        return False
    return all(getattr(sampling, field) == default for field, default in _DEFAULTS_IF_GREEDY.items())


@dataclass(frozen=True, slots=True)
class PromptLogprobsChunk:
    """A chunk that computes logprobs of prompt tokens: `num_tokens` positions from `start`."""

    index: int  # of the chunk, in the plan
    first: int  # index, in the step's flat tokens, of the logits that predict position `start`
    slot: int
    start: int
    num_tokens: int
    num_top: int  # number of most probable tokens that are wanted for each position


@dataclass(slots=True)
class Batch:
    """One step's inputs, on the device."""

    input_ids: Tensor  # [num_tokens]
    position_ids: Tensor  # [num_tokens]
    attention: AttentionMetadata
    logits_indices: Tensor  # [num_sampled] which tokens' logits are wanted
    sampled_cells: Tensor  # [num_sampled] where in the token table the sampled ids go
    sampling: list[SamplingRow]  # num_sampled of them
    prompt_logprobs: list[PromptLogprobsChunk]
    slots: Indices  # [num_sequences] on the host: the slot of each sequence of `attention`
    # [num_tokens] on the host: the place of each token's LoRA adapter in memory, or NO_ADAPTER; None if none has one.
    adapter_places: Indices | None = None
    adapter_failures: dict[int, str] = field(default_factory=dict)  # by slot: the reason why its adapter cannot be used


class SlotTable:
    """The worker's state of the sequences in its slots: tokens, block tables, sampling parameters.

    The tokens are on the device: a sampled id is written here and read by the next step, without a copy to the host.
    The block tables are on the host, where plans arrive.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.row_length = max_model_len + 1  # the last sampled token has a position too
        # int32: with many slots and a long context this is the largest table.
        self.token_ids = torch.zeros(num_slots * self.row_length, dtype=torch.int32, device=device)
        max_blocks = min(num_blocks, -(-self.row_length // block_size))
        self.block_tables: NDArray[np.int32] = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.num_blocks: Indices = np.zeros(num_slots, dtype=np.int64)
        self.num_used_blocks = 0  # at the start of the cache; no slot has had a block after these
        self.slot_assignments: dict[int, SlotAssignment] = {}
        self.takes_likeliest: dict[int, bool] = {}  # see the function; by slot
        self._with_prompt_logprobs: set[int] = set()  # slots whose sequences requested prompt logprobs

    def update(self, plan: StepPlan) -> None:
        """Apply a plan's changes: newly assigned slots, new blocks, and known token ids."""
        for assignment in plan.slot_assignments:
            self.assign(assignment)
        for chunk in plan.chunks:
            if chunk.new_block_ids:
                self.append_blocks(chunk)
        known = [(assignment.slot, 0, assignment.token_ids) for assignment in plan.slot_assignments]
        known += [(chunk.slot, chunk.start, chunk.token_ids) for chunk in plan.chunks if chunk.token_ids]
        self.write(known)

    def assign(self, assignment: SlotAssignment) -> None:
        """Give the slot to a new sequence, and clear all state of the former one."""
        self.slot_assignments[assignment.slot] = assignment
        self.takes_likeliest[assignment.slot] = takes_likeliest(assignment)
        self.num_blocks[assignment.slot] = 0
        if assignment.sampling.prompt_logprobs is None:
            self._with_prompt_logprobs.discard(assignment.slot)
        else:
            self._with_prompt_logprobs.add(assignment.slot)

    def write(self, known: list[tuple[int, int, tuple[int, ...]]]) -> None:
        """Write token ids that the host knows, each as (slot, position of the first, ids)."""
        known = [each for each in known if each[2]]
        if not known:
            return
        token_ids = np.array([token_id for _, _, token_ids in known for token_id in token_ids], dtype=np.int32)
        cells = np.concatenate(
            [np.arange(len(token_ids)) + (slot * self.row_length + start) for slot, start, token_ids in known]
        )
        indices, values = to_device([cells, token_ids], self.token_ids.device)
        self.token_ids.index_copy_(0, indices, values)

    def is_constrained(self, row: SamplingRow) -> bool:
        """Return whether a grammar constrains the row.

        The rank that sends results has the grammar's text, and the others only its number.
        """
        return row.sampling.grammar is not None or self.slot_assignments[row.slot].grammar is not None

    def append_blocks(self, chunk: ScheduledChunk) -> None:
        """Append the chunk's new blocks to its slot's block table."""
        count = self.num_blocks[chunk.slot]
        self.block_tables[chunk.slot, count : count + len(chunk.new_block_ids)] = chunk.new_block_ids
        self.num_blocks[chunk.slot] += len(chunk.new_block_ids)
        self.num_used_blocks = max(self.num_used_blocks, 1 + max(chunk.new_block_ids))

    def sampling_row(self, chunk: ScheduledChunk, num_behind: int = 0) -> SamplingRow:
        """Return how logits of the chunk are sampled: of its last position, or of those before `num_behind` drafts."""
        assignment, position = self.slot_assignments[chunk.slot], chunk.start + chunk.num_tokens - num_behind
        return SamplingRow(assignment.sampling, position, chunk.slot, position - assignment.prompt_length)

    def has_prompt_logprobs(self, plan: StepPlan) -> bool:
        """Return whether logprobs of prompt tokens are to be computed in a step."""
        if not self._with_prompt_logprobs:
            return False
        return any(self.prompt_logprobs_chunk(0, 0, chunk) is not None for chunk in plan.chunks)

    def prompt_logprobs_chunk(self, index: int, first: int, chunk: ScheduledChunk) -> PromptLogprobsChunk | None:
        """Return which prompt tokens the chunk's logits predict; None if no logprobs of them are wanted.

        `index` is the chunk's place in the plan, `first` that of its first token in the flat step.
        """
        assignment = self.slot_assignments[chunk.slot]
        num_top, start = assignment.sampling.prompt_logprobs, chunk.start + 1
        if num_top is None or start >= assignment.prompt_length:
            return None
        num_tokens = min(chunk.num_tokens, assignment.prompt_length - start)
        return PromptLogprobsChunk(index, first, chunk.slot, start, num_tokens, num_top)


def make_batch(plan: StepPlan, table: SlotTable) -> Batch:
    """Bring the table up to date with the plan, and lay the step out flat."""
    table.update(plan)
    return lay_out(plan, table)


def lay_out(plan: StepPlan, table: SlotTable) -> Batch:
    """Lay the step out flat. The table is up to date with the plan.

    Chunks begin at `start`, and the plan has the token ids of their drafts: see workers/speculation/speculator.py.

    A token is sampled after the chunk's last known token and after each draft. All of them are written to the token
    table, after their own positions. Those after a rejected draft are not used. They do no harm: the sequence's next
    chunk begins at its newest valid token, and every cell after that one is written before it is read.
    """
    device, block_size = table.token_ids.device, table.block_size
    slots = np.array([chunk.slot for chunk in plan.chunks])
    begins = np.array([chunk.start for chunk in plan.chunks])
    num_queries = np.array([chunk.num_tokens for chunk in plan.chunks])
    num_keys, ends = begins + num_queries, num_queries.cumsum()
    first = ends - num_queries  # where each chunk begins in the flat step
    # From here on, arrays have one element for each token of the flat step.
    positions = np.arange(ends[-1]) + (begins - first).repeat(num_queries)
    token_slots = slots.repeat(num_queries)
    blocks = table.block_tables[token_slots, positions // block_size]
    width = -(-int(num_keys.max()) // block_size)
    # For each sampled row: its chunk, and how many rows of that chunk come after it.
    sampled = [index for index, chunk in enumerate(plan.chunks) if chunk.samples]
    num_behind = [0] * len(sampled)
    if len(positions) > len(plan.chunks) and any(chunk.num_drafts for chunk in plan.chunks):
        rows = [(i, behind) for i in sampled for behind in range(plan.chunks[i].num_drafts, -1, -1)]
        sampled, num_behind = [i for i, _ in rows], [behind for _, behind in rows]
    behind_rows = np.array(num_behind, dtype=np.int64)
    cells, position_ids, logits_indices, sampled_cells, query_starts, lengths, block_table, slot_mapping = to_device(
        [
            token_slots * table.row_length + positions,
            positions,
            ends[sampled] - 1 - behind_rows,
            (slots * table.row_length + num_keys)[sampled] - behind_rows,
            np.append(first, ends[-1]).astype(np.int32),
            num_keys.astype(np.int32),
            table.block_tables[slots, :width],
            blocks.astype(np.int64) * block_size + positions % block_size,
        ],
        device,
    )
    attention = AttentionMetadata(block_size, num_queries, num_keys, query_starts, lengths, block_table, slot_mapping)
    prompts = (table.prompt_logprobs_chunk(i, int(first[i]), chunk) for i, chunk in enumerate(plan.chunks))
    return Batch(
        input_ids=table.token_ids[cells].long(),
        position_ids=position_ids,
        attention=attention,
        logits_indices=logits_indices,
        sampled_cells=sampled_cells,
        sampling=[table.sampling_row(plan.chunks[i], behind) for i, behind in zip(sampled, num_behind, strict=True)],
        prompt_logprobs=[chunk for chunk in prompts if chunk is not None],
        slots=slots,
    )
