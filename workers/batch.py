"""From a step plan to the tensors of one forward pass, every shape named.

The step is one flat row of tokens, whatever sequences they belong to: [num_tokens] ids and positions, no padding.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from servekit.messages import Row, Seat, StepPlan
from workers.attention import QueryGroup
from workers.sampler import SamplingRow

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
    slot_mapping: Tensor  # [num_tokens] flat KV cell of each token
    groups: list[QueryGroup]
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
        self,
        num_slots: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        pads_decodes: bool = True,
    ) -> None:
        self.block_size = block_size
        self.pads_decodes = pads_decodes  # decode rows of a group attend to as many pages as the longest of them
        self.row_length = max_model_len + 1  # the last sampled token has a position too
        # int32: with many slots and a long context this is the largest table there is.
        self.token_ids = torch.zeros(num_slots * self.row_length, dtype=torch.int32, device=device)
        max_blocks = min(num_blocks, -(-self.row_length // block_size))
        self.block_tables: Indices = np.zeros((num_slots, max_blocks), dtype=np.int64)
        self.num_blocks: Indices = np.zeros(num_slots, dtype=np.int64)
        self.seats: dict[int, Seat] = {}

    def sit(self, seat: Seat) -> None:
        """A new sequence takes the slot; nothing of the former one may be seen again."""
        self.seats[seat.slot] = seat
        self.num_blocks[seat.slot] = 0
        if seat.token_ids:
            first = seat.slot * self.row_length
            known = torch.tensor(seat.token_ids, dtype=torch.int32, device=self.token_ids.device)
            self.token_ids[first : first + len(seat.token_ids)] = known

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
    device = table.token_ids.device
    for seat in plan.seats:
        table.sit(seat)
    for row in plan.rows:
        table.append_blocks(row)
    lengths = [row.num_tokens for row in plan.rows]
    first = np.cumsum([0, *lengths[:-1]])  # where each row begins in the flat step
    positions = np.concatenate([np.arange(row.start, row.start + row.num_tokens) for row in plan.rows])
    slots = np.repeat([row.slot for row in plan.rows], lengths)

    def to_device(indices: Indices) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64)).to(device, non_blocking=True)

    _write_known_tokens(plan, table)
    blocks = table.block_tables[slots, positions // table.block_size]
    sampling = [(int(begin), row) for begin, row in zip(first, plan.rows, strict=True) if row.samples]
    prompt_rows = (table.prompt_row(i, int(first[i]), row) for i, row in enumerate(plan.rows))
    return Batch(
        input_ids=table.token_ids[to_device(slots * table.row_length + positions)].long(),
        position_ids=to_device(positions),
        slot_mapping=to_device(blocks * table.block_size + positions % table.block_size),
        groups=[
            QueryGroup(to_device(indices), to_device(positions[indices]), to_device(block_table))
            for indices, block_table in _group_rows(plan.rows, first, table)
        ],
        logits_indices=to_device(np.array([begin + row.num_tokens - 1 for begin, row in sampling])),
        sampled_cells=to_device(
            np.array([row.slot * table.row_length + row.start + row.num_tokens for _, row in sampling])
        ),
        sampling=[table.sampling_row(row) for _, row in sampling],
        prompt_rows=[row for row in prompt_rows if row is not None],
    )


def _write_known_tokens(plan: StepPlan, table: SlotTable) -> None:
    """Put the token ids that the manager sent into the token table."""
    known = [token_id for row in plan.rows for token_id in row.token_ids]
    cells = [
        row.slot * table.row_length + position
        for row in plan.rows
        for position in range(row.start, row.start + len(row.token_ids))
    ]
    device = table.token_ids.device
    table.token_ids[torch.tensor(cells, dtype=torch.int64, device=device)] = torch.tensor(
        known, dtype=torch.int32, device=device
    )


def _group_rows(rows: tuple[Row, ...], first: Indices, table: SlotTable) -> list[tuple[Indices, Indices]]:
    """(token_indices [B, Q], block_table [B, num_blocks]) of rows that compute equally many tokens Q.

    Rows of a group are padded to its longest block table. So that one long sequence does not make all others as
    expensive as itself, only tables of the same order of magnitude (in powers of two) come together; unless each row
    reads its own pages only.
    """
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        is_padded = table.pads_decodes or row.num_tokens > 1
        order = int(table.num_blocks[row.slot] - 1).bit_length() if is_padded else 0
        groups[row.num_tokens, order].append(index)
    shaped = []
    for (num_tokens, _), members in groups.items():
        token_indices = first[members][:, None] + np.arange(num_tokens)
        slots = [rows[index].slot for index in members]
        last = max(rows[index].start for index in members) + num_tokens - 1
        shaped.append((token_indices, table.block_tables[slots, : last // table.block_size + 1]))
    return shaped
