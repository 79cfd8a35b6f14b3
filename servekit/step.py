"""A step as the workload manager knows it, from its planning until its result is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from servekit.errors import WorkerLost
from servekit.messages import PromptLogprobs, Row, Seat, StepResult, TokenLogprobs
from servekit.sequence import FinishReason, Sequence


class SequenceToken(Struct, frozen=True, gc=False):
    """One committed token, and what it did to its sequence."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None  # if asked for
    failure: str | None = None  # why there is no token, where the worker could not choose one


@dataclass(slots=True)
class Step:
    """What is planned for a step, and who waits for what of it."""

    step_id: int
    planned_s: float
    budget: int  # tokens that may still be scheduled
    seats: list[Seat] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sampled: list[tuple[Sequence, int]] = field(default_factory=list)  # who samples, in which incarnation
    explained: dict[int, tuple[Sequence, int]] = field(default_factory=dict)  # by row: whose prompt, alike
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    result: StepResult | None = None  # when it has come before its turn

    def check_fits(self, result: StepResult) -> None:
        """Raise WorkerLost for what is no answer to this step: the worker is out of its mind."""
        num_tokens = len(self.sampled)
        fits = (
            len(result.token_ids) == num_tokens
            and len(result.logprobs) in (0, num_tokens)
            and all(map(self._is_explained, result.prompt_logprobs))
            and all(0 <= index < num_tokens for index, _ in result.failures)
        )
        if not fits:
            raise WorkerLost(f"the model worker's result does not fit its step of {num_tokens} tokens")

    def _is_explained(self, told: PromptLogprobs) -> bool:
        """Whether it speaks of the prompt tokens that its row's logits foretell, and of all of them."""
        if told.row not in self.explained:
            return False
        row, (sequence, _) = self.rows[told.row], self.explained[told.row]
        num_foretold = min(row.num_tokens, sequence.prompt_length - row.start - 1)
        return told.start == row.start + 1 and len(told.logprobs) == num_foretold
