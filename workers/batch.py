"""From a step plan to the tensors of one forward pass, every shape named.

The step is one flat row of tokens, whatever sequences they belong to: [num_tokens] ids and positions, no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from servekit.messages import Row, Seat, StepPlan
from workers.paged_step import StepRows
from workers.sampler import SamplingRow
from workers.staging import staged

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row whose logits foretell prompt tokens that are to be explained: `num_tokens` positions from `start` on."""

    row: int  # index into the plan's rows
    first: int  # where in the step's flat tokens the logits stand that foretell position `start`
    slot: int
    start: int
    num_tokens: int
    num_top: int


@dataclass(slots=True)
class Batch:
    """One step's inputs, on the device."""

    input_ids: Tensor  # [num_tokens]
    position_ids: Tensor  # [num_tokens]
    rows: StepRows
    logits_indices: Tensor  # [num_sampled] which tokens' logits are wanted
    sampled_cells: Tensor  # [num_sampled] where in the token table the sampled ids go
    sampling: list[SamplingRow]  # num_sampled of them
    prompt_rows: list[PromptRow]


class SlotTable:
    """What the worker remembers of the sequences in its seats, by slot: tokens, block tables, how to sample.

    The tokens live on the device: a sampled id is written here and read by the next step, without a detour over the
    host. The block tables live on the host, where plans arrive.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.row_length = max_model_len + 1  # the last sampled token has a position too
        # int32: with many slots and a long context this is the largest table there is.
        self.token_ids = torch.zeros(num_slots * self.row_length, dtype=torch.int32, device=device)
        max_blocks = min(num_blocks, -(-self.row_length // block_size))
        self.block_tables: NDArray[np.int32] = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.num_blocks: Indices = np.zeros(num_slots, dtype=np.int64)
        self.seats: dict[int, Seat] = {}

    def sit(self, seat: Seat) -> None:
        """A new sequence takes the slot; nothing of the former one may be seen again."""
        self.seats[seat.slot] = seat
        self.num_blocks[seat.slot] = 0

    def write(self, known: list[tuple[int, int, tuple[int, ...]]]) -> None:
        """Token ids that are known on the host, as (slot, position of the first, ids)."""
        token_ids = np.array([token_id for _, _, token_ids in known for token_id in token_ids], dtype=np.int32)
        if not len(token_ids):
            return
        cells = np.concatenate(
            [np.arange(len(token_ids)) + (slot * self.row_length + start) for slot, start, token_ids in known]
        )
        at, values = staged([cells, token_ids], self.token_ids.device)
        self.token_ids.index_copy_(0, at, values)

    def append_blocks(self, row: Row) -> None:
        count = self.num_blocks[row.slot]
        self.block_tables[row.slot, count : count + len(row.new_block_ids)] = row.new_block_ids
        self.num_blocks[row.slot] += len(row.new_block_ids)

    def sampling_row(self, row: Row) -> SamplingRow:
        seat, position = self.seats[row.slot], row.start + row.num_tokens
        return SamplingRow(seat.sampling, position, row.slot, position - seat.prompt_length)

    def prompt_row(self, index: int, first: int, row: Row) -> PromptRow | None:
        """None where nobody asks, or the prompt is behind."""
        seat = self.seats[row.slot]
        num_top, start = seat.sampling.prompt_logprobs, row.start + 1
        if num_top is None or start >= seat.prompt_length:
            return None
        return PromptRow(index, first, row.slot, start, min(row.num_tokens, seat.prompt_length - start), num_top)


def make_batch(plan: StepPlan, table: SlotTable) -> Batch:
    """Bring the table up to date with the plan, and lay the step out flat."""
    device, block_size = table.token_ids.device, table.block_size
    for seat in plan.seats:
        table.sit(seat)
    for row in plan.rows:
        table.append_blocks(row)
    of_seats = [(seat.slot, 0, seat.token_ids) for seat in plan.seats]
    table.write(of_seats + [(row.slot, row.start, row.token_ids) for row in plan.rows])
    seated = np.array([row.slot for row in plan.rows])
    begin = np.array([row.start for row in plan.rows])
    num_queries = np.array([row.num_tokens for row in plan.rows])
    num_keys, ends = begin + num_queries, num_queries.cumsum()
    first = ends - num_queries  # where each row begins in the flat step
    positions = np.arange(ends[-1]) + (begin - first).repeat(num_queries)
    slots = seated.repeat(num_queries)
    blocks = table.block_tables[slots, positions // block_size]
    width = -(-int(num_keys.max()) // block_size)
    sampled = [index for index, row in enumerate(plan.rows) if row.samples]
    cells, position_ids, logits_indices, sampled_cells, query_starts, lengths, block_table, slot_mapping = staged(
        [
            slots * table.row_length + positions,
            positions,
            ends[sampled] - 1,
            (seated * table.row_length + num_keys)[sampled],
            np.append(first, ends[-1]).astype(np.int32),
            num_keys.astype(np.int32),
            table.block_tables[seated, :width],
            blocks.astype(np.int64) * block_size + positions % block_size,
        ],
        device,
    )
    prompt_rows = (table.prompt_row(i, int(first[i]), row) for i, row in enumerate(plan.rows))
    return Batch(
        input_ids=table.token_ids[cells].long(),
        position_ids=position_ids,
        rows=StepRows(block_size, num_queries, num_keys, query_starts, lengths, block_table, slot_mapping),
        logits_indices=logits_indices,
        sampled_cells=sampled_cells,
        sampling=[table.sampling_row(plan.rows[index]) for index in sampled],
        prompt_rows=[row for row in prompt_rows if row is not None],
    )
