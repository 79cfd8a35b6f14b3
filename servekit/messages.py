"""What manager and worker say to each other: frozen values, msgpack on the wire, never pickled.

Fields are append-only. A `StepPlan` is self-contained as far as tokens go: it carries every token id the manager
knows for the positions it schedules, and the block tables of those it seats. So it grows with the step's token budget
and, where prompts are found in the prefix cache, with what they need not compute.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from servekit.sampling_params import SamplingParams


class LoadModel(Struct, frozen=True, tag="load_model"):
    """First message of a worker's life: load this model, make room for its KV cache."""

    model_path: str
    dtype: str
    device: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    load_format: str = "auto"  # dummy: random weights
    kv_cache_dtype: str = "auto"  # the model's own


class ModelInfo(Struct, frozen=True):
    """What the manager needs to know of a model; the worker reads it off the loaded one."""

    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float
    default_top_k: int
    default_top_p: float


class WorkerReady(Struct, frozen=True, tag="worker_ready"):
    """The model is loaded and its KV pages exist."""

    model: ModelInfo
    device: str
    dtype: str
    num_blocks: int
    kv_bytes_per_token: int
    load_time_s: float
    num_weight_bytes: int = 0  # as they stand in the model's files, or were made up
    weights_time_s: float = 0.0  # of `load_time_s`: until the layers were ready to compute with them
    attention: str = ""  # the way that was chosen for it


class Loading(Struct, frozen=True, tag="loading"):
    """How far the worker has come with its first message."""

    stage: str


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """The worker is there, whatever it is computing; said every `HEARTBEAT_S`, from a thread of its own."""


HEARTBEAT_S = 1.0


class WorkerFailed(Struct, frozen=True, tag="worker_failed"):
    """The worker cannot go on; `is_config_error` says the operator can mend it."""

    message: str
    is_config_error: bool = False


class Seat(Struct, frozen=True, array_like=True, gc=False):
    """A sequence takes a slot: forget what the slot held before, sample like this from now on.

    Tokens whose KV the prefix cache holds already are in no row. Where sampling looks back at them, they are here.
    """

    slot: int
    sampling: SamplingParams
    prompt_length: int = 0
    stop_token_ids: tuple[int, ...] = ()  # what may not come before `min_tokens`
    token_ids: tuple[int, ...] = ()  # of the positions before the first row
    grammar: int | None = None  # on the wire: where among the plan's grammars stands that of `sampling`


class Row(Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step: compute positions [start, start + num_tokens).

    `token_ids` are the known tokens from `start` on. It is shorter than `num_tokens` where the manager does not
    know the tail yet, because a step still in flight samples it; the worker has those ids in its own token table. It is
    longer by one where the prompt is to be explained: a chunk's last logits foretell the token behind it.
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]  # appended to the slot's block table
    samples: bool  # whether the last position's logits choose a token


class StepPlan(Struct, frozen=True, tag="step_plan"):
    """Everything a worker does in one step."""

    epoch: int  # which incarnation of the worker this is meant for
    step_id: int
    seats: tuple[Seat, ...]
    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...] = ()  # (from, to): whole blocks, copied before anything is computed
    grammars: tuple[str, ...] = ()  # on the wire: each one once, however many seats follow it

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def with_grammars_apart(self) -> StepPlan:
        """As it is sent: a hundred answers to one prompt would bring their grammar a hundred times."""
        places: dict[str, int] = {}
        seats = []
        for seat in self.seats:
            if (text := seat.sampling.grammar) is not None:
                place = places.setdefault(text, len(places))
                seat = replace(seat, sampling=replace(seat.sampling, grammar=None), grammar=place)
            seats.append(seat)
        return replace(self, seats=tuple(seats), grammars=tuple(places)) if places else self

    def with_grammars_back(self) -> StepPlan:
        """As it was planned."""
        if not self.grammars:
            return self
        seats = [
            seat
            if seat.grammar is None
            else replace(seat, sampling=replace(seat.sampling, grammar=self.grammars[seat.grammar]), grammar=None)
            for seat in self.seats
        ]
        return replace(self, seats=tuple(seats), grammars=())


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """What the model itself thought of a token: natural logarithms of its softmax, before any sampling parameter."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the likeliest, first the likeliest


class PromptLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Of the prompt tokens that a row's logits foretell: positions from `start` on, the prompt's end at most."""

    row: int  # index into the plan's rows
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(Struct, frozen=True, tag="step_result"):
    """What a step sampled: one token for each row that samples, in plan order."""

    epoch: int
    step_id: int
    token_ids: tuple[int, ...]
    step_time_s: float
    # Aligned with `token_ids`; empty where nobody asked, None for those who did not.
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # one for each row whose sequence asked and has some in it
    failures: tuple[tuple[int, str], ...] = ()  # (index into `token_ids`, why that one means nothing)


class StepFailed(Struct, frozen=True, tag="step_failed"):
    """The device's memory does not hold a step's intermediate values, not even in small pieces; the worker lives."""

    epoch: int
    step_id: int
    message: str


class StartProfile(Struct, frozen=True, tag="start_profile"):
    """Record what the steps after this one do; answered by `Profiled`."""

    directory: str  # for the trace
    max_steps: int  # the ones after these are not recorded


class StopProfile(Struct, frozen=True, tag="stop_profile"):
    """Write down what was recorded; answered by `Profiled`."""


class Profiled(Struct, frozen=True, tag="profiled"):
    """What came of it. A refusal changes nothing."""

    refusal: str = ""
    failure: str = ""  # why there is no trace of what was recorded
    path: str = ""  # of the trace, once it is written
    num_steps: int = 0


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """Last message of a worker's life."""


ToWorker = LoadModel | StepPlan | StartProfile | StopProfile | Shutdown
FromWorker = Loading | WorkerReady | WorkerFailed | Heartbeat | StepResult | StepFailed | Profiled
