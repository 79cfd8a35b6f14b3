"""Define the events that the engine reports while it serves. Metrics, step history and other recorders listen to them.

The engine calls observers from its main loop, so an observer must not block, and must not raise. Times are seconds on
the engine's clock; an observer reads no clock of its own. Events of tokens come once a step, never once a token.
"""

from __future__ import annotations

from msgspec import Struct

from servekit.protocol.messages import StepPlan, StepResult
from servekit.scheduler.sequence import FinishReason, Sequence


class StepSummary(Struct, frozen=True, gc=False):
    """The size of one planned step."""

    epoch: int  # the worker's incarnation; step ids keep ascending across epochs
    step_id: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int

    @staticmethod
    def of(plan: StepPlan) -> StepSummary:
        """Decode tokens belong to chunks of a single position, and its drafts, that sample; all others are prefill."""
        num_prefill_tokens = num_decode_tokens = 0
        for chunk in plan.chunks:
            if chunk.samples and chunk.num_tokens == 1 + chunk.num_drafts:
                num_decode_tokens += chunk.num_tokens
            else:
                num_prefill_tokens += chunk.num_tokens
        return StepSummary(plan.epoch, plan.step_id, num_prefill_tokens, num_decode_tokens, len(plan.chunks))


class Observer:
    """Receives events. Subclasses override the events that they need; the others do nothing.

    The server's own readiness probe causes step events, but no sequence or token events.
    """

    # -- sequences ----------------------------------------------------------------------------------------------------

    def sequence_admitted(self, sequence: Sequence) -> None:
        """A sequence was added to the workload manager."""

    def tokens_delivered(
        self, first_token_latencies_s: list[float], inter_token_latencies_s: list[float], now_s: float
    ) -> None:
        """One step delivered tokens to clients.

        The first list has the time since arrival for each sequence that got its first token. The second has the time
        since the token before for each sequence that got another one.
        """

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_tokens: int,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        """A sequence ended, for any reason, after its client got `num_tokens` tokens of it.

        The sequence may have more: tokens that were sampled after a stop string. The two token times are None if there
        is no token.
        """

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_sent(self, step: StepSummary, is_alone: bool, now_s: float) -> None:
        """A step was sent to the worker. `is_alone`: no other step is in flight."""

    def step_done(self, result: StepResult, num_tokens: int, loop_time_s: float, now_s: float) -> None:
        """The result of a step was committed, and `num_tokens` tokens of it were delivered.

        `loop_time_s` is how long the main loop's iteration took. A step that was in flight when its worker was lost is
        never done.
        """

    def idle_began(self, now_s: float) -> None:
        """The main loop has nothing to do."""

    def idle_ended(self, now_s: float) -> None:
        """The main loop has work again."""

    # -- workers ------------------------------------------------------------------------------------------------------

    def worker_ready(self, recovery_time_s: float | None, now_s: float) -> None:
        """A worker has loaded the model, `recovery_time_s` after the one before was lost; None for the first worker."""

    def worker_lost(self, cause: str) -> None:
        """The worker has to be replaced."""

    def worker_start_failed(self) -> None:
        """A replacement ended before it was ready. Another start follows, or the engine fails."""

    def accounting_error(self) -> None:
        """KV blocks or slots were leaked or assigned twice: a bug of servekit."""
