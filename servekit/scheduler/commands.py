"""Define the workload manager's inputs as values.

Each command names sequences by id, never by reference, and carries every time it depends on. So a recording of the
commands is enough to make another manager compute the same plans again.

`Operation[Outcome]` says what the manager answers to a command: `outcome = manager.apply(command)` is typed by it.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from typing import Generic, TypeVar

from msgspec import Struct

from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.crash_quarantine import CrashRecord
from servekit.scheduler.sequence import NEVER, FinishReason, Progress, Sequence
from servekit.scheduler.step import SequenceToken

Outcome = TypeVar("Outcome")


class Operation(Struct, Generic[Outcome], frozen=True):
    """The base of all commands. `Outcome` is the type of the manager's answer."""


class AddSequence(Operation[Sequence], frozen=True, tag="add", kw_only=True):
    """Accept a sequence; it starts when its turn comes. The manager raises ContextTooLong for one that never fits."""

    sequence_id: int  # ids ascend in order of arrival
    prompt_token_ids: TokenSequence[int]  # copied; in service an array, which is copied in microseconds
    sampling: SamplingParams
    arrival_s: float = 0.0
    tenant: str = ""  # only sequences of one tenant may share blocks; its tokens are charged to this tenant
    priority: int = 0  # lower is sooner
    ttft_deadline_s: float = NEVER  # on the manager's clock: without a first token by then, the sequence ends
    deadline_s: float = NEVER  # unfinished by then, the sequence ends
    leader_id: int | None = None  # an earlier sequence with the same prompt, from which this one is forked
    has_length_bound: bool = True  # whether max_tokens is the client's, or just what the context holds
    # Of the prompt's first full blocks. The manager computes the others when it needs them. The engine gives all those
    # of a leader: it computes them in slices, but a command cannot be interrupted.
    block_hashes: TokenSequence[bytes] = ()
    progress: Progress | None = None  # if another manager has served it until now
    crashes: CrashRecord | None = None  # crashes of workers there, in which it was in flight
    max_drafts: int | None = None  # maximum drafts in a step; None: as many as the configuration allows
    adapter: LoraAdapter | None = None  # only sequences with the same one may share blocks


class Plan(Operation[StepPlan | None], frozen=True, tag="plan"):
    """Plan the next step. The answer is None when there is nothing to dispatch."""

    now_s: float


class Commit(Operation[list[SequenceToken]], frozen=True, tag="commit"):
    """Apply a step's result. The answer is every token that was committed, in order."""

    result: StepResult
    now_s: float


class Expire(Operation[list[Sequence]], frozen=True, tag="expire"):
    """Finish every sequence whose deadline has passed. The answer is these sequences."""

    now_s: float


class Finish(Operation[bool], frozen=True, tag="finish"):
    """End a sequence. The answer is False if it had ended before, or never existed."""

    sequence_id: int
    reason: FinishReason
    # How many tokens its client got: with drafts, a span may have tokens after a stop string. None for all.
    num_output_tokens: int | None = None


class Withdraw(Operation[list[AddSequence]], frozen=True, tag="withdraw"):
    """Forget sequences. The answer is the commands with which another manager continues them, in order of arrival."""

    sequence_ids: tuple[int, ...] | None  # None for all; ids of sequences that have ended are ignored
    is_hand_over: bool = False  # of a prefill replica to a decode replica. No decision depends on it


class ChargeElsewhere(Operation[None], frozen=True, tag="charge_elsewhere"):
    """Count what was computed for tenants on other replicas since the last command of this kind."""

    num_tokens: dict[str, int]  # by tenant
    max_lead: int  # in tokens: no tenant gets more credit than this before those that wait here


class AnnounceBlocks(Operation[None], frozen=True, tag="announce_blocks"):
    """Note that the worker's KV connector holds these blocks, besides those that steps stored."""

    keys: TokenSequence[bytes]


class Restart(Operation[list[Sequence]], frozen=True, tag="restart"):
    """Forget what the worker held. The answer is the sequences that crash workers; the caller finishes them."""

    is_out_of_memory: bool = False
