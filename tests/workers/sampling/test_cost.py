"""Claims about what one row's options cost the step: counts of work, because times depend on the machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from servekit.protocol.messages import SlotAssignment
from servekit.protocol.sampling_params import SamplingParams
from workers.batch import SamplingRow, SlotTable
from workers.sampling import penalties, token_bans

VOCAB = 50
LONG, SHORT, NUM_ROWS = 4000, 5, 16


class CountedTokens:
    """The table's tokens; counts how many are read."""

    def __init__(self, token_ids: Tensor) -> None:
        self.device, self.num_read, self._token_ids = token_ids.device, 0, token_ids

    def __getitem__(self, cells: Tensor) -> Tensor:
        self.num_read += cells.numel()
        return self._token_ids[cells]


def one_long_answer(**options: Any) -> tuple[SlotTable, list[SamplingRow], CountedTokens]:
    """Return a long sequence beside short ones, all with the same options."""
    table = SlotTable(NUM_ROWS, LONG, num_blocks=4, block_size=4, device=torch.device("cpu"))
    counted: Any = CountedTokens(table.token_ids.random_(0, VOCAB, generator=torch.Generator().manual_seed(1)))
    table.token_ids = counted
    rows = []
    for slot in range(NUM_ROWS):
        params, position = SamplingParams(max_tokens=9, **options), LONG if slot == 0 else SHORT
        table.assign(SlotAssignment(slot, params, prompt_length=1, stop_token_ids=tuple(range(10))))
        rows.append(SamplingRow(params, position, slot, position - 1))
    return table, rows, counted


def test_a_long_answer_with_penalties_does_not_make_short_ones_read_as_much() -> None:
    table, rows, counted = one_long_answer(repetition_penalty=1.1, presence_penalty=0.5)
    penalties.adjust(torch.zeros(NUM_ROWS, VOCAB), rows, table)
    assert counted.num_read == LONG + (NUM_ROWS - 1) * SHORT


def test_the_prompt_is_not_read_for_penalties_of_the_answer() -> None:
    table, rows, counted = one_long_answer(frequency_penalty=0.5)
    rows = [SamplingRow(row.sampling, row.position, row.slot, num_outputs=2) for row in rows]
    penalties.adjust(torch.zeros(NUM_ROWS, VOCAB), rows, table)
    assert counted.num_read == 2 * NUM_ROWS


def test_a_long_bad_word_does_not_make_short_ones_read_as_much() -> None:
    words = (tuple(range(40)), *((token, 1) for token in range(30)))
    table, rows, counted = one_long_answer(bad_words=words)
    token_bans.ban(torch.zeros(NUM_ROWS, VOCAB), rows, table)
    assert counted.num_read == NUM_ROWS * (39 + 30)


def test_tokens_that_all_answers_to_a_request_name_are_prepared_once() -> None:
    """Name by name, 128 answers with 300 biases or 1,024 allowed tokens took longer than the model's step."""
    options: dict[str, Any] = {
        "logit_bias": tuple((token, 1.0) for token in range(20)),
        "allowed_token_ids": tuple(range(20)),
        "min_tokens": LONG,
    }
    table, rows, _ = one_long_answer(**options)
    penalties._known.cache_clear()
    token_bans._known.cache_clear()
    logits = token_bans.ban(penalties.adjust(torch.zeros(NUM_ROWS, VOCAB), rows, table), rows, table)
    assert penalties._known.cache_info().misses == 1
    assert token_bans._known.cache_info().misses == 2, "the allowed tokens, and the stop tokens"
    assert (logits[0] == 1.0).nonzero().flatten().tolist() == list(range(10, 20))
    assert (logits == logits[0]).all()
