"""One prompt and its growing answer: its states and its token arithmetic.

    WAITING ──admit──▶ RUNNING ──finish──▶ FINISHED
       ▲                  │
       └───preempt────────┘          (finish is reachable from every state, once)

One counter says how much is left to compute: `num_needed = known + pending - computed`. A prompt chunk, a decode and a
resume after preemption are the same arithmetic: they differ only in the counter's size, and share one token budget.

A step that verifies k drafts for a sequence samples 1 to k + 1 tokens. How many is known only from its result. Until
then all of them count: as pending, and their positions as computed. Both are upper bounds, too high by the same number:
the drafts that steps in flight reject. The commit of a step subtracts what it rejected from both. So `num_needed` is
exact at any time, and it is 1 for every sequence that has computed its prompt. This is the central invariant of
speculation; `WorkloadManager.check` asserts it. The number of known tokens is always exact, because they are committed.
The worker reads tokens that the manager does not know from its own token table (`ScheduledChunk`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from servekit.protocol.lora import LoraAdapter, salted
from servekit.protocol.messages import PromptLogprobs, TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence_history import ManagerLog, SequenceHistory

NEVER = float("inf")


class Status(StrEnum):
    """Whether a sequence waits for a slot and blocks, has them, or has ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"  # or withdrawn: it continues on another manager, as another Sequence


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    DEADLINE = "deadline"  # the client's own ttft_ms or deadline_ms passed
    ABORT = "abort"  # the client disconnected or cancelled
    ERROR = "error"  # the server failed it


class Progress(Struct, frozen=True, kw_only=True):
    """The state of a sequence on one workload manager, with which it continues on another."""

    output_token_ids: array[int]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    first_scheduled_s: float | None
    num_cached_tokens: int | None
    num_preemptions: int
    num_share_preemptions: int
    incarnation: int  # its first one there: a sequence that comes back must not be taken for what it was before
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    history: SequenceHistory | None = None


class SequenceBlocks:
    """The KV blocks of one sequence. While serving, only the KV cache manager writes them.

    `hashes` belong to the tokens, and outlive the blocks.
    """

    __slots__ = (
        "capacity",
        "hashes",
        "num_found",
        "num_published",
        "num_reserved",
        "peak_entry",
        "table",
    )

    def __init__(self, hashes: Iterable[bytes]) -> None:
        self.hashes = list(hashes)  # hashes of full blocks of known tokens, as far as they were needed
        self.clear()

    def clear(self) -> None:
        """Back to no blocks."""
        self.table: list[int] = []
        self.capacity = 0  # positions that the table covers
        self.num_found = 0  # blocks at the front of the table that another sequence computed
        self.num_reserved = 0  # blocks that are set aside for it, and follow those in the table
        self.num_published = 0  # blocks at the front of the table that the prefix cache knows
        self.peak_entry: tuple[int, int] | None = None  # what FuturePeak counts for it, if it does


class Sequence:
    """A sequence's whole state. The worker holds nothing that cannot be computed again from it.

    Three boundaries split its positions: [0, num_computed) have their KV written by steps already dispatched,
    [num_computed, num_tokens) are known and wait for their KV, and up to `num_pending` more are being sampled by steps
    in flight. While serving, only the workload manager makes and writes sequences, and only its KV cache manager writes
    `kv`; checkpoint.py restores both for a replay. An API process of several has copies without blocks, which it writes
    from the engine process's messages.

    `leader` is an earlier sequence with the same prompt: this one is forked from it, and shares its prompt's blocks.
    """

    __slots__ = (
        "acceptance",
        "acceptance_weight",
        "adapter",
        "arrival_s",
        "deadline_s",
        "finish_reason",
        "first_sampled_step_id",
        "first_scheduled_s",
        "has_length_bound",
        "history",
        "incarnation",
        "kv",
        "last_step_id",
        "leader",
        "max_drafts",
        "max_length",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_drafted_tokens",
        "num_missing",
        "num_pending",
        "num_preemptions",
        "num_share_preemptions",
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
        prompt_token_ids: Iterable[int],
        sampling: SamplingParams,
        arrival_s: float = 0.0,
        *,
        tenant: str = "",
        priority: int = 0,
        ttft_deadline_s: float = NEVER,
        deadline_s: float = NEVER,
        leader: Sequence | None = None,
        has_length_bound: bool = True,
        stop_set: frozenset[int] = frozenset(),
        block_hashes: Iterable[bytes] = (),
        progress: Progress | None = None,
        max_drafts: int = 0,
        history: SequenceHistory | None = None,
        adapter: LoraAdapter | None = None,
    ) -> None:
        self.sequence_id = sequence_id  # ids ascend in order of arrival
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.tenant = tenant  # only sequences of one tenant may share blocks; its tokens are charged to this tenant
        # Of the model it computes with. No decision depends on it, but for the hashes of blocks, so no record has it.
        self.adapter = adapter
        self.priority = priority  # lower is sooner
        self.ttft_deadline_s = ttft_deadline_s  # on the manager's clock: without a first token by then, it ends
        self.deadline_s = deadline_s  # unfinished by then, it ends
        self.leader = leader
        self.max_drafts = max_drafts  # maximum drafts that a step may verify for it
        self.has_length_bound = has_length_bound  # whether max_tokens is the client's, or just what the context holds
        # Prompt, then every committed output token. An array of 32-bit integers takes half of a list's memory, and the
        # garbage collector does not look into it: a list of a million would hold the event loop for 10 ms.
        self.token_ids = array("i", prompt_token_ids)
        self.prompt_length = len(self.token_ids)
        assert self.prompt_length > 0, "a sequence starts from at least one token"
        self.max_length = self.prompt_length + sampling.max_tokens
        assert leader is None or leader.tenant == tenant, "a fork is of the same request"
        assert leader is None or leader.adapter == adapter, "forks compute with the same adapter"
        assert leader is None or leader.token_ids[: self.prompt_length] == self.token_ids, "forks share the prompt"

        self.stop_set = stop_set  # tokens that end it: the model's own and the client's
        self.prompt_logprobs: list[TokenLogprobs] = []  # for positions from 1 on, if requested; never dropped

        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # the client's stop token that ended it, if one did
        self.first_scheduled_s: float | None = None
        self.num_cached_tokens: int | None = None  # found when it was first admitted
        # Tokens to compute, as far as was known when it was queued or admitted.
        self.num_missing = self.prompt_length
        self.num_preemptions = 0
        self.num_share_preemptions = 0  # preemptions for another tenant's share, not for a shortage of blocks
        self.num_drafted_tokens = 0  # verified drafts, in steps whose results were committed
        self.num_accepted_tokens = 0  # accepted drafts among these
        self.acceptance = 0.0  # how likely its next draft is accepted. DraftLengths writes it, and
        self.acceptance_weight = 0.0  # the number of drafts in that mean
        # Counts how often its computation was set back: to the start when its slot and blocks were taken away, or to
        # its last known position when the worker deferred its token. Results of an earlier incarnation are ignored.
        self.incarnation = -1
        self.history = history or SequenceHistory(arrival_s, ManagerLog())  # no decision depends on it
        self.kv = SequenceBlocks(block_hashes)
        self.reset_computation()
        if progress is not None:
            self.token_ids.extend(progress.output_token_ids)
            self.prompt_logprobs.extend(progress.prompt_logprobs)
            self.first_scheduled_s = progress.first_scheduled_s
            self.num_cached_tokens = progress.num_cached_tokens
            self.num_preemptions = progress.num_preemptions
            self.num_share_preemptions = progress.num_share_preemptions
            self.incarnation = progress.incarnation
            self.num_drafted_tokens = progress.num_drafted_tokens
            self.num_accepted_tokens = progress.num_accepted_tokens

    def progress(self) -> Progress:
        """What another manager needs, besides the arguments that this sequence was made with, to continue it."""
        return Progress(
            output_token_ids=self.token_ids[self.prompt_length :],
            prompt_logprobs=tuple(self.prompt_logprobs),
            first_scheduled_s=self.first_scheduled_s,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_share_preemptions=self.num_share_preemptions,
            incarnation=self.incarnation + 1,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            history=self.history,
        )

    def reset_computation(self) -> None:
        """Back to having no slot and nothing computed; the tokens stay. The KV cache manager takes the blocks."""
        self.incarnation += 1
        self.slot: int | None = None
        self.num_computed = 0
        self.num_pending = 0
        self.first_sampled_step_id: int | None = None  # the first to sample for it in this incarnation
        self.last_step_id = -1  # the newest step that reads or writes its blocks

    def rewind(self) -> None:
        """Set it back to its last known position, from which a token is to be sampled again.

        Slot and blocks stay, and so does `first_sampled_step_id`: that step did compute the prompt. The last position's
        KV is written a second time, with the same tokens before it, so the block may be in the prefix cache already.
        """
        self.incarnation += 1
        self.num_computed = len(self.token_ids) - 1
        self.num_pending = 0

    def settle_drafts(self, num_planned: int, num_verified: int, num_accepted: int) -> None:
        """Correct the bounds that counted all planned drafts of a step as accepted, before its tokens are appended."""
        self.num_computed -= num_planned - num_accepted
        self.num_pending -= num_planned - num_accepted
        self.num_drafted_tokens += num_verified
        self.num_accepted_tokens += num_accepted

    @property
    def salt(self) -> str:
        """What the hashes of its blocks start from."""
        return salted(self.tenant, self.adapter)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :].tolist()

    @property
    def num_needed(self) -> int:
        """How many positions must be computed before the next unknown token can be sampled."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_shareable(self) -> int:
        """How many positions, from the first one on, are needed for their KV only, so that cached KV replaces them.

        The last known position's logits are needed too. So are those of every position that predicts a prompt token
        whose logprobs are requested and not there yet: logits at position p predict position p + 1.
        """
        if self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1:
            return len(self.prompt_logprobs)
        return len(self.token_ids) - 1

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Append the logprobs of a step; those that were there before, from an earlier incarnation, stay."""
        num_known = len(self.prompt_logprobs) + 1 - part.start
        assert num_known >= 0, f"{self} would leave out {-num_known} of its prompt's tokens"
        self.prompt_logprobs.extend(part.logprobs[num_known:])

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.sequence_id} {self.status} {self.prompt_length}+{self.num_output_tokens}"
            f"/{self.sampling.max_tokens} tokens, computed {self.num_computed}, pending {self.num_pending}>"
        )
