"""Define the messages between manager and worker: frozen values, msgpack on the wire, never pickled.

Fields are append-only. A `StepPlan` contains every token id that the manager knows for the scheduled positions, and the
block tables of the sequences that get a slot. So its size grows with the step's token budget, and with the cached
tokens of prompts that sampling or drafts need.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from servekit.protocol.lora import AdapterLoaded, LoadAdapter, LoraAdapter
from servekit.protocol.prediction import BatchResult, LoadPredictor, PredictBatch, PredictorReady
from servekit.protocol.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from servekit.protocol.speculative_config import SpeculativeConfig

# Upper bounds of the parts of a StepResult in msgpack: an integer below 2**32 or the head of an array takes 5 bytes, a
# float 9, a character up to 4.
MAX_FAILURE_CHARACTERS = 500  # of a grammar's error, for the client
_TOKEN_BYTES = 5
_LOGPROBS_BYTES = 16 + 12 * MAX_TOP_LOGPROBS  # of one token
_FAILURE_BYTES = 16 + 4 * MAX_FAILURE_CHARACTERS
_OTHER_BYTES = 2**20  # limit of every other message: the description of a model, or the text of an error
Count = Annotated[int, Meta(ge=0, le=2**62)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]  # of a block: the hash of its prefix
MAX_LISTED_KEYS = 2**14  # in one message


class LoadModel(Struct, frozen=True, tag="load_model"):
    """The first message to a worker: load this model, and allocate its KV cache."""

    model_path: str
    dtype: str
    device: str  # or several, separated by commas: one for each rank
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    load_format: str = "auto"  # dummy: random weights
    kv_cache_dtype: str = "auto"  # the model's own
    device_index: int | None = None  # of the first GPU, where `device` names none; None lets torch choose
    # Fingerprint of the files that other workers have loaded. Other files are refused before they are loaded. ""
    # accepts any.
    fingerprint: str = ""
    # With several ranks, each holds a part of the model, and all of them get the same plans. A stage of the pipeline
    # has some of the layers, and consecutive ranks, each of which holds a part of every layer of the stage.
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int = 0
    # Where the ranks find each other: a file on their machine, or `tcp://HOST:PORT/NAME`, a store that rank 0 has at
    # this address, with a name that only this group uses.
    rendezvous: str = ""
    load_timeout_s: float = 1800.0  # how long a rank may wait for another one
    heartbeat_timeout_s: float = 3.0  # after this time without a heartbeat, an agent counts a rank as lost
    quantization: str | None = None  # the format that unquantized weights are rounded to; None: they are not rounded
    quantization_group_size: int | None = None  # None chooses by the format
    speculative: SpeculativeConfig = SpeculativeConfig()  # never `auto`
    max_loras: int = 0  # number of LoRA adapters that fit into memory at a time
    max_lora_rank: int = 0
    kv_offload_memory_bytes: int = 0  # of the host, for blocks that leave the KV cache; 0: no KV connector
    kv_offload_dir: str = ""  # folder for blocks on disk; "": no files
    kv_offload_disk_bytes: int = 0
    # Memory for blocks that prefill workers hand over: the open files that a child process inherits, one for each rank
    # of each of these workers, and which of the workers this one is, which writes; None lets it read from all.
    kv_transfer_fds: tuple[int, ...] = ()
    kv_transfer_own: int | None = None
    local_rank: int | None = None  # on its machine, set by the agent, where the ranks are on several machines
    # For a worker that joins, whose agent has this memory, and carries blocks over the network: its size, and a random
    # name that the workers of one server share. The agent sets the file that it fills for this worker.
    kv_transfer_bytes: int = 0  # 0: no blocks are handed over
    kv_transfer_group: bytes = b""
    kv_transfer_inbox: int | None = None

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def own_transfer_fds(self) -> tuple[int, ...]:
        """The open files of this rank, one for each prefill worker: of those with the same part of each block.

        If the ranks are on several machines, none of the others is among the files.
        """
        is_alone = self.local_rank is not None
        return self.kv_transfer_fds if is_alone else self.kv_transfer_fds[self.rank :: self.num_ranks]

    @property
    def max_answer_bytes(self) -> int:
        """The maximum size of a message of this worker, in bytes: the result of the largest step, or an error's text.

        In the largest step, each sequence samples a token, and every other position gives logprobs: it is one of a
        prompt, or the draft after it is accepted, and then it gives a token as well.
        """
        # A count, an index of a deferred token, the head of prompt logprobs, a failure and its token's logprobs.
        bytes_of_sequence = 7 * _TOKEN_BYTES + _LOGPROBS_BYTES + _FAILURE_BYTES
        bytes_of_position = _TOKEN_BYTES + _LOGPROBS_BYTES
        return _OTHER_BYTES + self.max_num_seqs * bytes_of_sequence + self.max_num_batched_tokens * bytes_of_position

    @property
    def is_result_rank(self) -> bool:
        """Whether this rank sends the results: the first one of the last stage."""
        return self.rank == self.num_ranks - self.tensor_parallel_size


class ModelInfo(Struct, frozen=True):
    """What the manager needs to know of a model. The worker reads it from the loaded model."""

    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float
    default_top_k: int
    default_top_p: float
    fingerprint: str = ""  # of the model's files: workers with the same fingerprint compute the same
    quantization: str = ""  # the format of the weights; "" if they are not quantized
    notice: str = ""  # a sentence about how it is served that users should know; "" if there is none


class RankInfo(Struct, frozen=True):
    """Where a worker's process runs. The limits are above any real machine, but bound what a worker may report."""

    device: Annotated[str, Meta(max_length=100)]
    cpus: Annotated[str, Meta(max_length=2**15)]  # the cores that it may use, in the kernel's list format
    host: Annotated[str, Meta(max_length=100)] = ""  # of a rank that joined by itself; "" where the worker's is known


class WorkerReady(Struct, frozen=True, tag="worker_ready"):
    """The answer to LoadModel: the model is loaded, and its KV pages are allocated."""

    model: ModelInfo
    device: str
    dtype: str
    num_blocks: int
    kv_bytes_per_token: int
    load_time_s: float
    num_weight_bytes: int = 0  # in the model's files; in memory, if they are quantized, random or divided among ranks
    weights_time_s: float = 0.0  # of `load_time_s`: until the layers were ready to compute with them
    attention: str = ""  # the attention backend that was chosen
    memory_bytes: int = 0  # memory of this process on its device, with the whole KV cache; 0 if it is not known
    # What the bytes of a handed-over block depend on, as a digest; "" where none is handed over. Not compared.
    kv_layout: Annotated[str, Meta(max_length=100)] = ""
    num_transfer_blocks: int = 0  # that can be loaded at the most, of those that it sends; 0 if it sends none
    # Where other workers' agents fetch its blocks: tcp://HOST:PORT or tls://HOST:PORT, set by its agent; by rank, if
    # each of them has an agent of its own.
    transfer_addresses: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=1024)] = ()
    # One for each process that the model is divided among; one if it is not divided. Not compared.
    ranks: Annotated[tuple[RankInfo, ...], Meta(max_length=1024)] = ()

    @property
    def place(self) -> str:
        """Its KV blocks, devices and cores, as a text for log lines."""
        places = [
            f"{f'{rank.host}, ' if rank.host else ''}{rank.device}, cores {rank.cpus}" for rank in self.ranks
        ] or [self.device]
        if len(places) > 1:
            places = [f"rank {index}: {place}" for index, place in enumerate(places)]
        each = f" in each of {len(places)} ranks" if len(places) > 1 else ""
        return f"{self.num_blocks} KV blocks{each}, {'; '.join(places)}"

    def difference(self, other: WorkerReady) -> str | None:
        """Return why a sequence of `other` cannot continue here with the same tokens; None if it can.

        The data type of the KV cache needs no comparison: the server sets it, or it is `dtype`.
        """
        for field in ModelInfo.__struct_fields__:
            own, others = getattr(self.model, field), getattr(other.model, field)
            if own != others:
                return (
                    f"it has loaded another model: its {field} is {own!r:.100}, that of other workers {others!r:.100}"
                )
        if self.dtype != other.dtype:
            return (
                f"it computes in {self.dtype:.100} on {self.device:.100}, and other workers in {other.dtype:.100} on "
                f"{other.device:.100}, which gives other tokens; start the server with the same --dtype for all "
                "devices, as in --dtype float32 (auto is the checkpoint's type on a GPU, and on a CPU it depends on "
                "the processor)"
            )
        return None


class Loading(Struct, frozen=True, tag="loading"):
    """The worker's progress with LoadModel."""

    stage: str


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """A heartbeat, sent every `HEARTBEAT_S` from a thread of its own, during every computation."""


HEARTBEAT_S = 1.0


class WorkerFailed(Struct, frozen=True, tag="worker_failed"):
    """The worker cannot continue. `is_config_error`: the operator can correct the cause."""

    message: str
    is_config_error: bool = False
    is_out_of_memory: bool = False  # a rank ran out of memory in a step; then smaller steps may fit


class Leaving(Struct, frozen=True, tag="leaving"):
    """The worker is about to leave. It answers the steps that were sent to it, and waits for Shutdown."""


class SlotAssignment(Struct, frozen=True, array_like=True, gc=False):
    """Assign a slot to a sequence: reset the slot, and sample with these parameters from now on.

    Tokens whose KV is in the prefix cache are in no chunk. If sampling or drafts depend on them, they are here.
    """

    slot: int
    sampling: SamplingParams
    prompt_length: int = 0
    stop_token_ids: tuple[int, ...] = ()  # these may not be sampled before `min_tokens`
    token_ids: tuple[int, ...] = ()  # of the positions before the first chunk
    grammar: int | None = None  # on the wire: index into the plan's `grammars`, in place of `sampling.grammar`
    tenant: str = ""
    group_id: int = 0  # the same for all answers to a prompt, whose grammar time is counted together
    adapter: LoraAdapter | None = None


class ScheduledChunk(Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step: compute positions [start, start + num_tokens).

    `token_ids` are the known tokens from `start` on. It is shorter than `num_tokens` where the manager does not know
    the tail yet, because a step still in flight samples it; the worker has those ids in its own token table. It is
    longer by one where prompt logprobs are requested: a chunk's last logits predict the token after it.

    The last `num_drafts` positions are for drafts: the worker's own guesses at the tokens after the known one. It may
    have fewer. For each position it draws the model's token, with that position's random number. A draft is accepted if
    it equals the token drawn at the position before it, and all drafts before it were accepted. So the tokens are the
    same with and without drafts.

    While drafts are in flight, the manager counts all of them as accepted. So where `token_ids` is empty, `start` is an
    upper bound: the worker begins at the newest token that it has sampled, and computes as many positions from there.
    The chunk's blocks reach up to the bound. Keys and values of rejected drafts stay in the blocks until a later chunk
    overwrites them; no chunk reads them before that.
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]  # appended to the slot's block table
    samples: bool  # whether a token is sampled from the last position's logits; with drafts, from those before it, too
    num_drafts: int = 0


class StepPlan(Struct, frozen=True, tag="step_plan"):
    """The plan of everything that a worker does in one step."""

    epoch: int  # the incarnation of the worker that it is for
    step_id: int
    slot_assignments: tuple[SlotAssignment, ...]
    chunks: tuple[ScheduledChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()  # (from, to): whole blocks, copied before anything is computed
    grammars: tuple[str, ...] = ()  # on the wire: each grammar once, even if many assignments use it
    # Blocks that the KV connector keeps under a key, and that it brings back. Before all else: first the stores,
    # because the step writes to their blocks, then the loads, then the copies.
    stores: tuple[tuple[int, bytes], ...] = ()  # (block, key)
    loads: tuple[tuple[bytes, int], ...] = ()  # (key, block)
    # Blocks that other workers can load under a key when the result has come. Behind all that the step computes.
    sends: tuple[tuple[int, bytes], ...] = ()  # (block, key)
    # Keys of blocks that waiting sequences need. The worker begins to read those that are on its disk.
    prefetches: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def has_drafts(self) -> bool:
        """Whether a chunk has positions for drafts."""
        return any(chunk.num_drafts for chunk in self.chunks)

    def pack_grammars(self) -> StepPlan:
        """The plan as it is sent, with each grammar once, because all answers to one prompt share a grammar."""
        indices: dict[str, int] = {}
        packed = []
        for assignment in self.slot_assignments:
            grammar = assignment.sampling.grammar
            if grammar is None:
                packed.append(assignment)
            else:
                index = indices.setdefault(grammar, len(indices))
                sampling = replace(assignment.sampling, grammar=None)
                packed.append(replace(assignment, sampling=sampling, grammar=index))
        return replace(self, slot_assignments=tuple(packed), grammars=tuple(indices)) if indices else self

    def unpack_grammars(self) -> StepPlan:
        """The plan as it was before `pack_grammars`."""
        if not self.grammars:
            return self
        unpacked = []
        for assignment in self.slot_assignments:
            if assignment.grammar is None:
                unpacked.append(assignment)
            else:
                sampling = replace(assignment.sampling, grammar=self.grammars[assignment.grammar])
                unpacked.append(replace(assignment, sampling=sampling, grammar=None))
        return replace(self, slot_assignments=tuple(unpacked), grammars=())


_PAIR = struct.Struct("=id")  # a token id and its logprob, in twelve bytes


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """The model's log-probabilities for one token: natural logarithms of its softmax, before any sampling parameter."""

    logprob: float
    packed_top: bytes = (
        b""  # of the likeliest tokens, the likeliest first; as objects they would take ten times the memory
    )

    @classmethod
    def of(cls, logprob: float, token_ids: Sequence[int], logprobs: Sequence[float]) -> TokenLogprobs:
        """Return the logprob of a token with those of the likeliest tokens."""
        pairs = zip(token_ids, logprobs, strict=True)
        return cls(logprob, b"".join([_PAIR.pack(token_id, value) for token_id, value in pairs]))

    @property
    def top(self) -> list[tuple[int, float]]:
        """(token id, logprob) of the likeliest tokens, the likeliest first. Raises ValueError if it cannot be read."""
        try:
            return list(_PAIR.iter_unpack(self.packed_top))
        except struct.error as error:
            raise ValueError(str(error)) from None


class PromptLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of the prompt tokens that a chunk's logits predict: from position `start` on, up to the prompt's end."""

    chunk_index: int  # into the plan's chunks
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class TransferReport(Struct, frozen=True, array_like=True, gc=False):
    """What a worker's KV connector did in a step, and what it holds afterwards."""

    failed_loads: tuple[int, ...] = ()  # indices of the plan's loads
    dropped_keys: tuple[Key, ...] = ()  # keys that it held before and cannot load any more
    num_stored: Count = 0  # stored blocks, without those that it held before
    num_loaded_from_memory: Count = 0
    num_loaded_from_disk: Count = 0
    num_unwritten: Count = 0  # blocks that were not written to the disk, because it was too slow or failed
    num_in_memory: Count = 0
    num_on_disk: Count = 0
    block_bytes: Count = 0
    num_sent: Count = 0  # to other workers
    num_received: Count = 0  # loaded from other workers; these are not among those from memory

    def with_ranks(self, others: Sequence[TransferReport]) -> TransferReport:
        """Return the report of a group of ranks, each of which has a part of every block.

        A block that one rank could not load, or has dropped, is of no use to the others. If they drop more keys than a
        message may have, some are left out: those cost a failed load each.
        """
        reports = (self, *others)
        dropped = dict.fromkeys(key for report in reports for key in report.dropped_keys)
        return replace(
            self,
            failed_loads=tuple(sorted({index for report in reports for index in report.failed_loads})),
            dropped_keys=tuple(dropped)[:MAX_LISTED_KEYS],
            num_received=min(report.num_received for report in reports),
            num_unwritten=max(report.num_unwritten for report in reports),
            block_bytes=sum(report.block_bytes for report in reports),
        )


class StepResult(Struct, frozen=True, tag="step_result"):
    """What a step sampled: a span of tokens for each chunk that samples, in plan order.

    A span has one token, and one more for each accepted draft of its chunk. `counts` has the length of each span.

    A worker may defer a chunk that samples: it samples no token, because what it needs for that is not ready (the mask
    of a grammar), and the other chunks must not wait. The manager then schedules the chunk's last position again. Until
    that comes, the worker has no token for the chunks of the same slot after it. It still appends their blocks to the
    slot's block table; what it computes and reports for them is ignored. The next step follows at once. So a
    worker that defers all tokens of a step should wait a little first. It must bound how often it defers a token.

    The span of a chunk that is deferred, or whose token is invalid, is that one token. If this happens after an
    accepted draft, the worker ends the span before it. In the next step it is then at the first position.
    """

    epoch: int
    step_id: int
    token_ids: tuple[int, ...]  # of all spans, one after the other
    step_time_s: float
    # Aligned with `token_ids`; empty if no sequence requested them, None for each sequence that did not.
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # for each chunk with requested ones
    failures: tuple[tuple[int, str], ...] = ()  # (number of the span, why its token is invalid)
    deferred: tuple[int, ...] = ()  # numbers of spans for which no token was sampled
    counts: tuple[int, ...] = ()  # tokens of each span; empty if all have one
    # Drafts that were verified for each span, which may be fewer than were planned; empty if there were none.
    num_drafts: tuple[int, ...] = ()
    draft_time_s: float = 0.0  # of the step's time: what the drafter took to make drafts
    # The same for prompts, and for answers that went on without drafts: it computes them only where drafts are wanted.
    draft_prompt_time_s: float = 0.0
    num_adapter_reads: int = 0  # LoRA adapters that were read into memory since the step before
    num_adapter_evictions: int = 0  # of these: in the place of another one
    transfers: TransferReport | None = None  # with a KV connector


class StepAcknowledged(Struct, frozen=True, tag="step_acknowledged"):
    """The answer of all ranks but the one that sends the result.

    The ranks of the last stage must have sampled the same tokens. The others sample none.
    """

    epoch: int
    step_id: int
    digest: bytes  # of the sampled tokens and the lengths of their spans; empty if there are none
    transfers: TransferReport | None = None  # of this rank's part of the blocks, with a KV connector

    @classmethod
    def of(cls, result: StepResult) -> StepAcknowledged:
        """Return the acknowledgement of a rank that computed this result."""
        token_ids = array("q", (*result.token_ids, *result.counts)).tobytes()
        digest = blake2b(token_ids, digest_size=8).digest() if token_ids else b""
        return cls(result.epoch, result.step_id, digest, result.transfers)


class StepFailed(Struct, frozen=True, tag="step_failed"):
    """A step ran out of device memory, even when it was computed in small pieces. The worker continues to run."""

    epoch: int
    step_id: int
    message: str


class StartProfile(Struct, frozen=True, tag="start_profile"):
    """Start to profile the steps after this message; answered by `Profiled`."""

    directory: str  # for the trace
    max_steps: int  # later steps are not recorded


class StopProfile(Struct, frozen=True, tag="stop_profile"):
    """Stop the profile and write it to a file; answered by `Profiled`."""


class Profiled(Struct, frozen=True, tag="profiled"):
    """The answer to StartProfile and StopProfile. A refusal changes nothing."""

    refusal: str = ""
    failure: str = ""  # why the trace could not be written
    path: str = ""  # of the trace, once it is written
    num_steps: int = 0


class ListBlocks(Struct, frozen=True, tag="list_blocks"):
    """List the blocks that the worker's KV connector holds, from this number on; answered by `BlocksListed`."""

    start: int = 0


class BlocksListed(Struct, frozen=True, tag="blocks_listed"):
    """The answer to ListBlocks. No keys: there are no more."""

    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_LISTED_KEYS)] = ()


MAX_FETCHED_KEYS = 2**15  # of one sequence


class FetchBlocks(Struct, frozen=True, tag="fetch_blocks"):
    """For the agent of a decode worker that has joined: fetch blocks from other agents, in this order.

    It is no message to the worker itself. Answered by `BlocksFetched`, after other messages.
    """

    number: Count
    # Of the agent that has the parts of all ranks, or of one for each rank that this agent has, in their order.
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(min_length=1, max_length=1024)]
    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MAX_FETCHED_KEYS)]


# How a FetchBlocks begins: so an agent, which passes on all other messages, need not decode each of them.
FETCH_BLOCKS = b"".join(msgspec.msgpack.encode(FetchBlocks(0, (), ())).partition(b"fetch_blocks")[:2])


class BlocksFetched(Struct, frozen=True, tag="blocks_fetched"):
    """The agent's answer to FetchBlocks: the worker can load these of the blocks."""

    number: Count
    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_FETCHED_KEYS)] = ()


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """The last message to a worker: exit."""


ToWorker = (
    LoadModel
    | StepPlan
    | StartProfile
    | StopProfile
    | LoadAdapter
    | ListBlocks
    | LoadPredictor
    | PredictBatch
    | Shutdown
)
FromWorker = (
    Loading
    | WorkerReady
    | WorkerFailed
    | Leaving
    | Heartbeat
    | StepResult
    | StepAcknowledged
    | StepFailed
    | Profiled
    | AdapterLoaded
    | BlocksListed
    | BlocksFetched
    | PredictorReady
    | BatchResult
)
