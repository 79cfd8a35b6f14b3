"""Define a simulation's scenario: arrivals and faults with their times, and what each client should receive."""

from __future__ import annotations

from msgspec import Struct

from servekit.protocol.messages import TokenLogprobs
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence
from servekit.simulation.worker import NaiveReference


class Arrival(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for one answer."""

    name: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    has_length_bound: bool = True
    tenant: str = ""
    priority: int = 0
    ttft_s: float | None = None
    deadline_s: float | None = None
    forks: int | None = None  # the name of the arrival with the same prompt that this one is forked from
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    crashes_at: int | None = None  # a worker that computes this position crashes
    deferred_percent: int = 0  # of the steps that would sample a token for it, how many defer the token
    max_drafts: int | None = None  # that a step may verify for it
    drafter: str = "random"  # right, wrong, alternates, few or random: how many drafts the worker makes, and how good


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault, and when it happens."""

    at_s: float
    kind: str  # abort | duplicate | forge | reorder | delay | kill | memory | leave | move | damage
    target: int = 0  # of an abort: the arrival's name; of others: what chooses the replica, and how it is hit


class Scenario(Struct, frozen=True, kw_only=True):
    """Everything that a simulation depends on."""

    scheduler: SchedulerConfig
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    is_reckless: bool = False  # the manager predicts no output at all where the client does not bound it
    has_eager_drafts: bool = False  # each decode gets as many drafts as it may have, whatever they cost
    step_base_s: float = 1e-3
    step_token_s: float = 1e-4
    drafting_s: float = 0.0  # of a round of the drafter, which makes one more draft for each sequence
    num_replicas: int = 1  # each with a manager and a worker
    recovery_s: float = 0.0  # until a replica that lost its worker, or left, is ready again
    exchange_interval_s: float = 0.01  # after which replicas learn what the others computed for each tenant
    num_offloaded_blocks: int = 0  # that the KV connector of each worker has room for
    num_prefill_replicas: int = 0  # that hand sequences over to the others; they are the first ones
    num_transfer_blocks: int = 0  # that the memory of each of them has room for
    is_connector_durable: bool = False  # whether the next worker finds what the connector of a lost one held


class Client:
    """An arrival, what it has received, and what it should receive."""

    __slots__ = (
        "arrival",
        "expected",
        "expected_logprobs",
        "expected_prompt_logprobs",
        "num_accepted_tokens",
        "received",
        "sequence",
        "token_times_s",
    )

    def __init__(self, arrival: Arrival, sequence: Sequence, expected: list[int]) -> None:
        self.arrival = arrival
        self.sequence = sequence
        self.expected = expected
        self.expected_logprobs: list[TokenLogprobs] = []
        self.expected_prompt_logprobs: list[TokenLogprobs] = []
        if arrival.logprobs is not None:
            logprobs = NaiveReference.logprobs([*arrival.prompt, *expected], arrival.logprobs)
            self.expected_logprobs = logprobs[len(arrival.prompt) - 1 :]
        if arrival.prompt_logprobs is not None:
            self.expected_prompt_logprobs = NaiveReference.logprobs(arrival.prompt, arrival.prompt_logprobs)
        self.num_accepted_tokens = 0  # drafts, as far as its tenant was charged for them
        self.received: list[int] = []
        self.token_times_s: list[float] = []
