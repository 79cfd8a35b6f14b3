"""One prompt and its growing answer: its states and its token arithmetic.

    WAITING ──seat──▶ RUNNING ──finish──▶ FINISHED
       ▲                 │
       └───preempt───────┘          (finish is reachable from every state, once)

One counter tells all there is to do: `num_needed = known + pending - computed`. A prompt chunk, a decode and a resume
after preemption are the same arithmetic; they differ in how large it is, and share every step under one budget.
"""

from __future__ import annotations

from enum import StrEnum

from servekit.messages import PromptLogprobs, TokenLogprobs
from servekit.sampling_params import SamplingParams

NEVER = float("inf")


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    DEADLINE = "deadline"  # the client's own ttft_ms or deadline_ms passed
    ABORT = "abort"  # the client left or gave up
    ERROR = "error"  # the server failed it


class Sequence:
    """A sequence's whole state. The worker holds nothing that cannot be computed again from it.

    Three boundaries split its positions: [0, num_computed) have their KV written by steps already dispatched,
    [num_computed, num_tokens) are known and wait for their KV, and `num_pending` more are being sampled by steps in
    flight. Whoever makes a sequence sets what the constructor takes; afterwards only the workload manager writes.

    `leader` is an earlier sequence with the same prompt: this one is forked from it, and shares its prompt's blocks.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "block_table",
        "capacity",
        "deadline_s",
        "finish_reason",
        "first_sampled_step_id",
        "first_scheduled_s",
        "has_length_bound",
        "incarnation",
        "last_step_id",
        "leader",
        "max_length",
        "num_cached_tokens",
        "num_computed",
        "num_found_blocks",
        "num_losses",
        "num_missing",
        "num_pending",
        "num_preemptions",
        "num_published",
        "num_tokens_at_loss",
        "priority",
        "prompt_length",
        "prompt_logprobs",
        "sampling",
        "sequence_id",
        "slot",
        "status",
        "stop_set",
        "stop_token_id",
        "tenant",
        "token_ids",
        "ttft_deadline_s",
    )

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        arrival_s: float = 0.0,
        *,
        tenant: str = "",
        priority: int = 0,
        ttft_deadline_s: float = NEVER,
        deadline_s: float = NEVER,
        leader: Sequence | None = None,
        has_length_bound: bool = True,
    ) -> None:
        assert prompt_token_ids, "a sequence starts from at least one token"
        self.sequence_id = sequence_id  # in order of arrival
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.tenant = tenant  # only sequences of one tenant may share blocks; whose account its tokens go to
        self.priority = priority  # lower is sooner
        self.ttft_deadline_s = ttft_deadline_s  # on the manager's clock: no first token by then, and it is over
        self.deadline_s = deadline_s  # not finished by then, and it is over
        self.leader = leader
        self.has_length_bound = has_length_bound  # whether max_tokens is the client's, or just what the context holds
        self.prompt_length = len(prompt_token_ids)
        self.max_length = len(prompt_token_ids) + sampling.max_tokens
        self.token_ids = list(prompt_token_ids)  # prompt, then every committed output token
        assert leader is None or leader.tenant == tenant, "a fork is of the same request"
        assert leader is None or leader.token_ids[: self.prompt_length] == self.token_ids, "forks share the prompt"

        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt positions from 1 on, if asked for; kept for life

        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # which of the client's stop tokens ended it, if one did
        self.first_scheduled_s: float | None = None
        self.num_cached_tokens: int | None = None  # found when it was first seated
        # Tokens to compute, as far as was known when it lined up or was seated.
        self.num_missing = len(prompt_token_ids)
        self.num_preemptions = 0
        self.num_losses = 0  # workers lost in a row while it was under way, with no new token between
        self.num_tokens_at_loss = 0  # of the last one
        # Counts the times it lost its seat. A result of an earlier incarnation is ignored by construction.
        self.incarnation = -1
        self.stop_set: frozenset[int] = frozenset()  # tokens that end it; the manager knows the model's own
        self.block_hashes: list[bytes] = []  # of the full blocks of known tokens, as far as anyone asked
        self.forget_seat()

    def forget_seat(self) -> None:
        """Back to having nothing computed; the tokens stay."""
        self.incarnation += 1
        self.slot: int | None = None
        self.block_table: list[int] = []
        self.capacity = 0  # positions that the block table covers
        self.num_found_blocks = 0  # at the front of the table, computed by somebody else
        self.num_published = 0  # blocks at the front of the table that others may find
        self.num_computed = 0
        self.num_pending = 0
        self.first_sampled_step_id: int | None = None  # the first to sample for it in this seat
        self.last_step_id = -1  # the newest step that reads or writes its blocks

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def num_needed(self) -> int:
        """How many positions must be computed before the next unknown token can be sampled."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_shareable(self) -> int:
        """Positions of which nothing but their KV is wanted, so that somebody else's will do.

        Of the last known one the logits are wanted too, and of those whose logits foretell a prompt token that is to
        be explained and is not yet. Logits at position p foretell position p + 1.
        """
        if self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1:
            return len(self.prompt_logprobs)
        return len(self.token_ids) - 1

    def explain_prompt(self, told: PromptLogprobs) -> None:
        """Take in what a step says of prompt tokens; what was said before it lost its seat stands."""
        num_known = len(self.prompt_logprobs) + 1 - told.start
        assert num_known >= 0, f"{self} would leave out {-num_known} of its prompt's tokens"
        self.prompt_logprobs.extend(told.logprobs[num_known:])

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.sequence_id} {self.status} {self.prompt_length}+{self.num_output_tokens}"
            f"/{self.sampling.max_tokens} tokens, computed {self.num_computed}, pending {self.num_pending}>"
        )
