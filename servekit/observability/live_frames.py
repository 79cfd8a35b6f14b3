"""Define the frames of the live view: the scheduler's state as lengths, states and counts, without any text.

A frame contains no prompt and no answer. Every frame is complete, so a viewer that missed one has lost nothing; the web
console, the terminal and tests read the same structs. Times are seconds on the server's clock, of which only
differences are meaningful; `LiveState.now_s` is the current time on that clock.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MAX_SEQUENCES = 128  # in a frame: running sequences by rank, then waiting ones
MAX_CELLS = 4096  # in the grid of KV blocks
MAX_STEPS = 200
MAX_ENDED = 64
MAX_ADAPTERS_SHOWN = 16  # LoRA adapters that have requests

# A cell of the grid is the id of a sequence, which is 0 or more, or one of these.
FREE, CACHED, SHARED, FENCED = -1, -2, -3, -4


class LiveStep(Struct, frozen=True, array_like=True, gc=False):
    """One step."""

    step_id: int  # ascends, also across workers; with several replicas, over all of them
    sent_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    duration_s: float | None  # in the worker; None while the step runs, and if its worker was lost
    replica: int = 0


class LiveSequence(Struct, frozen=True, gc=False, omit_defaults=True):
    """A running or waiting sequence, in the state that the next step is planned from."""

    sequence_id: int  # in order of arrival
    state: Literal["waiting", "prefill", "decode"]
    num_prompt_tokens: int
    num_computed_tokens: int  # positions whose KV is written, or will be by a step in flight
    num_output_tokens: int
    max_tokens: int  # limit on output tokens
    arrival_s: float
    request_id: str = ""  # empty if the sequence belongs to another tenant than the viewer's
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    num_drafted_tokens: int = 0  # drafts that were verified
    num_accepted_tokens: int = 0  # of these: accepted
    num_blocks: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class LiveEnd(Struct, frozen=True, gc=False, omit_defaults=True):
    """A sequence that has ended."""

    sequence_id: int
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    arrival_s: float
    ended_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0


class LiveWorker(Struct, frozen=True, omit_defaults=True):
    """The model worker of a replica, and the replica's sequences and KV blocks."""

    state: str  # "serving", or the current stage of loading
    device: str = ""  # known when the model is loaded, as are the next two fields
    dtype: str = ""
    attention: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_available_blocks: int = 0  # hold no KV, or a cached prefix
    host: str = ""  # of a worker that has joined, as it says; empty for one that the server has started


class LiveModel(Struct, frozen=True):
    """One of several models."""

    name: str
    state: str  # cold | waiting | loading | ready | recovering | draining | unloading | failed
    kind: str = "generate"  # generate | embed | rerank | classify


class LiveAdapters(Struct, frozen=True):
    """The LoRA adapters of the model."""

    num_adapters: int
    num_waiting: int  # requests that wait for a place for their adapter
    in_use: list[tuple[str, int]]  # name and requests of those that have most, up to MAX_ADAPTERS_SHOWN


class LiveLimits(Struct, frozen=True):
    """Limits that are fixed while this server runs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_total_tokens: int
    num_blocks: int
    block_size: int


class LiveState(Struct, frozen=True, omit_defaults=True):
    """One frame. Until the model is loaded, `limits` is None and all lists are empty."""

    now_s: float
    state: str  # loading | ready | recovering | draining | failed
    stage: str  # what the server is doing, as text for people
    model_name: str
    version: str
    workers: list[LiveWorker]
    kind: str = "generate"  # what the model does: generate | embed | rerank | classify
    models: list[LiveModel] = []  # of a server with several: all that the viewer's tenant may use
    adapters: LiveAdapters | None = None  # of a server that may have some
    limits: LiveLimits | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # hold no KV
    num_cached_blocks: int = 0  # hold a cached prefix, and can be allocated, too
    num_generated_tokens: int = 0  # since the server began, as are the next seven counts
    num_prompt_tokens: int = 0  # looked up in the prefix cache
    num_cached_tokens: int = 0  # found in the prefix cache
    num_preemptions: int = 0
    num_draft_steps: int = 0  # times that a step verified drafts of a sequence; these three by speculative decoding
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    tokens_per_s: float = 0.0  # generated tokens, over the last two seconds
    prefill_limit: int = 0  # prefill tokens that the next step may compute
    ttft_p50_s: float | None = None  # over the first tokens of the last minute, at most 512
    ttft_p95_s: float | None = None
    sequences: list[LiveSequence] = []
    ended: list[LiveEnd] = []  # newest last
    steps: list[LiveStep] = []  # newest last
    blocks_per_cell: int = 1
    cells: list[tuple[int, int]] = []  # runs of (kind, number of cells), from block 0 on
