"""What somebody who watches the scheduler is told, ten times a second at most: lengths, states and counts.

No word of what anybody asked or was answered stands in it. Every frame is whole: who missed one has lost nothing, and a
page, a terminal and a test read the same structs. Times are seconds on the server's clock, of which only differences
mean anything; `LiveState.now_s` is the clock's own.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MOST_SEQUENCES = 128  # in a frame: those who run, by rank, then those in line
MOST_CELLS = 4096  # in the grid of blocks
MOST_STEPS = 200
MOST_ENDED = 64

# What a cell of the grid is, where it is not one sequence's: then it is that sequence's id, which is 0 or more.
FREE, CACHED, SHARED, FENCED = -1, -2, -3, -4


class LiveStep(Struct, frozen=True, array_like=True, gc=False):
    """A step, newest last."""

    step_id: int  # begins anew with no worker; steps of one frame ascend
    sent_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    duration_s: float | None  # in the worker; None while it is under way, or lost


class LiveSequence(Struct, frozen=True, gc=False, omit_defaults=True):
    """A sequence that is alive, as far as the next step may be planned."""

    sequence_id: int  # in order of arrival
    state: Literal["waiting", "prefill", "decode"]
    num_prompt_tokens: int
    num_computed_tokens: int  # positions whose keys and values are written, or will be by a step under way
    num_output_tokens: int
    max_tokens: int  # of the answer
    arrival_s: float
    request_id: str = ""  # of whom the viewer's own tenant asked for; empty for others'
    num_cached_tokens: int = 0  # of the prompt: found, not computed
    num_preemptions: int = 0
    num_blocks: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class LiveEnd(Struct, frozen=True, gc=False, omit_defaults=True):
    """A sequence that has ended, newest last."""

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
    """A model worker."""

    state: str  # what it does: "serving", or at which point of loading it is
    device: str = ""  # told when it is loaded, as is what follows
    dtype: str = ""
    attention: str = ""


class LiveLimits(Struct, frozen=True):
    """What nothing can exceed while this server runs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_total_tokens: int
    num_blocks: int
    block_size: int


class LiveState(Struct, frozen=True, omit_defaults=True):
    """One frame. Until the model is loaded there are no limits, and lists are empty."""

    now_s: float
    state: str  # loading | ready | recovering | draining | failed
    stage: str  # in words, of a server that is not ready
    model_name: str
    version: str
    workers: list[LiveWorker]
    limits: LiveLimits | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # hold nothing
    num_cached_blocks: int = 0  # hold a prefix that may be found again; free to take as well
    num_generated_tokens: int = 0  # since the server began, as are the next four
    num_prompt_tokens: int = 0  # that were looked up in the prefix cache
    num_cached_tokens: int = 0  # that were found there
    num_preemptions: int = 0
    num_steps: int = 0
    tokens_per_s: float = 0.0  # generated, in the last two seconds
    prefill_limit: int = 0  # tokens of prefill that the next step may carry
    ttft_p50_s: float | None = None  # of the first tokens of the last minute, 512 of them at most
    ttft_p95_s: float | None = None
    sequences: list[LiveSequence] = []
    ended: list[LiveEnd] = []
    steps: list[LiveStep] = []
    blocks_per_cell: int = 1
    cells: list[tuple[int, int]] = []  # runs of (what it is, how many cells), from block 0 on
