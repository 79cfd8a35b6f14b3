"""One prompt and its growing answer: its states and its token arithmetic.

    WAITING ──admit──▶ RUNNING ──finish──▶ FINISHED
       ▲                  │
       └────preempt───────┘          (finish is reachable from every state, once)

One counter tells all there is to do: `num_needed = known + pending - computed`. A prompt chunk, a decode and a resume
after preemption differ only in how large it is, so the scheduler has no prefill mode and no decode mode.
"""

from __future__ import annotations

from enum import StrEnum

from servekit.sampling_params import SamplingParams


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client left or gave up
    ERROR = "error"  # the server failed it


class Sequence:
    """A sequence's whole state. The worker holds nothing that cannot be computed again from it.

    Three boundaries split its positions: [0, num_computed) have their KV written by steps already dispatched,
    [num_computed, num_tokens) are known and wait for their KV, and `num_pending` more are being sampled by steps in
    flight. Only the workload manager writes these fields.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "block_table",
        "finish_reason",
        "first_scheduled_s",
        "incarnation",
        "last_step_id",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_published",
        "prompt_length",
        "salt",
        "sampling",
        "sequence_id",
        "slot",
        "status",
        "stop_token_id",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        arrival_s: float = 0.0,
        salt: str = "",
    ) -> None:
        assert prompt_token_ids, "a sequence starts from at least one token"
        self.sequence_id = sequence_id
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.prompt_length = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)  # prompt, then every committed output token
        self.num_computed = 0
        self.num_pending = 0
        self.block_table: list[int] = []
        self.salt = salt  # only sequences with the same salt may share blocks
        self.block_hashes: list[bytes] = []  # of the full blocks of known tokens, as far as anyone asked
        self.num_published = 0  # blocks at the front of the table that others may find
        self.num_cached_tokens: int | None = None  # found when it was first admitted
        self.slot: int | None = None
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # which of the client's stop tokens ended it, if one did
        self.num_preemptions = 0
        # Counts the times it lost its seat. A result of an earlier incarnation is ignored by construction.
        self.incarnation = 0
        self.last_step_id = -1  # the newest step that computes for it

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
        if self.num_output_tokens + self.num_pending >= self.sampling.max_tokens:
            return 0  # a step in flight is certain to end it
        return len(self.token_ids) + self.num_pending - self.num_computed

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.sequence_id} {self.status} {self.prompt_length}+{self.num_output_tokens}"
            f"/{self.sampling.max_tokens} tokens, computed {self.num_computed}, pending {self.num_pending}>"
        )
