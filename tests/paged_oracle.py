"""A worker that computes nothing and checks everything: the outside truth for the workload manager.

It keeps KV pages as a real worker does, but stores in each cell the token that was written there. Before it samples,
it reads the sequence back through its block table; a block handed to two sequences, a chunk skipped or a stale slot
shows up as a wrong token. What it samples depends on the whole prefix, so one wrong cell changes the answer for good.
"""

from __future__ import annotations

from servekit.messages import StepPlan, StepResult


def next_token(prefix: list[int], vocab_size: int = 1000) -> int:
    """The model: a function of every token before it."""
    state = 1469598103934665603
    for token_id in prefix:
        state = ((state ^ token_id) * 1099511628211) % 2**64
    return state % vocab_size


def naive_generate(prompt: list[int], max_tokens: int, eos: frozenset[int]) -> list[int]:
    """One prompt, one token at a time: what every schedule has to reproduce."""
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token([*prompt, *output]))
        if output[-1] in eos:
            break
    return output


class PagedOracle:
    """Executes step plans over cells that hold token ids."""

    def __init__(self, num_blocks: int, block_size: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.cells: list[int | None] = [None] * (num_blocks * block_size)
        self.tokens: dict[int, dict[int, int]] = {}  # slot -> position -> token, as the worker's token table
        self.block_tables: dict[int, list[int]] = {}
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        assert plan.rows and 0 < plan.num_tokens <= self.max_num_batched_tokens
        for source, target in plan.copies:
            first, size = source * self.block_size, self.block_size
            self.cells[target * size : (target + 1) * size] = self.cells[first : first + size]
        for seat in plan.seats:
            self.tokens[seat.slot], self.block_tables[seat.slot] = {}, []
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot was scheduled twice in one step"
        sampled = []
        for row in plan.rows:
            known, table = self.tokens[row.slot], self.block_tables[row.slot]
            table.extend(row.new_block_ids)
            known.update(enumerate(row.token_ids, start=row.start))
            stop = row.start + row.num_tokens
            for position in range(row.start, stop):
                self.cells[self._cell(table, position)] = known[position]
            if row.samples:
                prefix = [self.cells[self._cell(table, position)] for position in range(stop)]
                # Positions before a seat's first row were found in the prefix cache; what they hold is checked by
                # what is sampled from it.
                wrong = [position for position, token_id in known.items() if prefix[position] != token_id]
                assert not wrong, "the pages hold another sequence"
                token_id = next_token(prefix)
                known[stop] = token_id
                sampled.append(token_id)
        return StepResult(plan.epoch, plan.step_id, tuple(sampled), 0.0)

    def _cell(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size
