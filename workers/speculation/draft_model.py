"""Draft with a smaller model, or with the model itself with weights of fewer bits, one token after the other.

It is a second loaded model on the same device. Its keys and values are in blocks with the numbers of the model's own:
block 7 of a sequence holds both models' keys and values of the same tokens. So hits in the prefix cache, forks, copies
of blocks and preemption need no bookkeeping here. Long prompts are computed in the same steps as the model's, and short
ones before the first draft: so the first token does not wait for them, and a sequence without drafts never needs them.

A block that was filled without drafts may have been published without the draft model's keys and values.
So there is a number for each block: how many of its positions have them. A sequence that takes such a block from the
prefix cache computes what is missing before its first draft, and then all sequences have it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from servekit.errors import ConfigError
from servekit.protocol.cpu_dtype import multiplies_bfloat16
from servekit.protocol.messages import LoadModel, ScheduledChunk, StepPlan
from workers.attention.interface import AttentionBackend, AttentionMetadata, PagedStep, Rotation
from workers.attention.selector import choose_attention
from workers.batch import make_batch
from workers.device.memory import allocation_refused_as
from workers.device.transfer import to_device
from workers.kv_cache.pages import KVCache, bytes_per_block
from workers.layers.cpu_language_model import make_cpu_language_model
from workers.layers.fused_decoder import FusedDecoder
from workers.layers.linear import can_pack
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.speculation.drafter import Drafter, DraftRequest, Target

log = logging.getLogger("servekit.worker")

# The most tokens that one step computes to catch up after steps in which no drafts were wanted. If drafts are only
# tried, the limit is a few blocks, so that the step takes about as long as others. If drafts are wanted, it is higher,
# because a sequence loses more time by waiting for its drafts.
MAX_CATCH_UP_TOKENS = 256
MAX_WANTED_CATCH_UP_TOKENS = 2048
# The last tokens of a sequence that are computed with the drafts after them: the newest one, and before it the last of
# several drafts that were all accepted.
MAX_LACKING = 2
# Each plan that asks for drafts adds one to the demand, up to the maximum, and each other plan subtracts one. From the
# minimum on, drafts are wanted; two steps in which drafts are tried do not reach it.
MIN_DEMAND, MAX_DEMAND = 3, 7
# The tokens of one prompt that are left out until its first draft: as many as one step can catch up with.
MAX_LEFT_OUT_TOKENS = MAX_CATCH_UP_TOKENS
_UNASSIGNED = -1


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model that is loaded, before its keys and values have memory."""

    loaded: LoadedModel
    attention: AttentionBackend
    head: nn.Module  # [num_tokens, hidden_size] -> [num_tokens, vocab_size]
    bytes_per_block: int

    def make_drafter(self, target: Target) -> DraftModelDrafter:
        """Return the drafter, with as many blocks as the model has. Raises ConfigError if they do not fit."""
        return DraftModelDrafter(self, target)


def load_draft_model(
    target: LoadedModel, settings: LoadModel, report_stage: Callable[[str], None] = lambda _: None
) -> DraftModel:
    """Load the draft model that `settings.speculative` names, for the model `target`.

    Raises ConfigError for files that cannot be served, and for another vocabulary than the model's.
    """
    speculative = settings.speculative
    is_same_model = speculative.method == "self"
    path = Path(settings.model_path if is_same_model else speculative.directory(settings.model_path))
    quantization = speculative.quantization if is_same_model else None
    if not path.is_dir():
        raise ConfigError(
            f"--speculative {speculative.method}: there is no draft model in {path}; name its directory, as in "
            "--speculative draft:PATH, or choose --speculative ngram, which needs no files"
        )
    try:
        loaded = ModelManager(str(target.device)).load(
            path,
            _draft_dtype(target, settings),
            None,
            load_format=settings.load_format if is_same_model else "auto",
            quantization=quantization,
            report_stage=lambda stage: report_stage(f"draft model: {stage}"),
        )
    except ConfigError as error:
        raise ConfigError(f"--speculative {speculative.method}: {error.message}") from error
    if not is_same_model:
        _check_vocabulary(path, loaded, Path(settings.model_path), target)
    head = loaded.model.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"--speculative {speculative.method}: transformers names no output head of {loaded.info.architecture}, "
            "which a draft model needs; choose another draft model, or --speculative ngram"
        )
    block_size = settings.block_size
    attention = choose_attention(loaded.device, loaded.dtype, loaded.layers, loaded.attention_params, block_size)
    block_bytes = bytes_per_block(loaded.layers, attention.block_shapes, block_size, attention.page_dtype)
    log.info(
        "draft model: %.1f M parameters in %s (%s), %d bytes of keys and values for each token",
        loaded.info.num_parameters / 1e6,
        str(loaded.dtype).removeprefix("torch."),
        loaded.info.quantization or "not quantized",
        -(-block_bytes // block_size),
    )
    return DraftModel(loaded, attention, head, block_bytes)


def _draft_dtype(target: LoadedModel, settings: LoadModel) -> str:
    """Return the data type of the draft model: the one that `--dtype` names.

    With auto, a CPU may compute the model in float32. Drafts need not be exact, and in bfloat16 a step of few tokens
    reads half as many bytes.
    """
    if settings.dtype == "auto" and target.device.type == "cpu" and multiplies_bfloat16() and can_pack(torch.bfloat16):
        return "bfloat16"
    return settings.dtype


def _check_vocabulary(path: Path, draft: LoadedModel, target_path: Path, target: LoadedModel) -> None:
    """Raise ConfigError unless both models' token ids mean the same.

    Models of one family may pad their vocabularies to different sizes. So sizes may differ if the tokenizers are equal.
    """
    tokens, target_tokens = _tokens_digest(path), _tokens_digest(target_path)
    if tokens is not None and target_tokens is not None and tokens != target_tokens:
        raise ConfigError(
            f"the draft model in {path} has another tokenizer than the model in {target_path}, so its token ids mean "
            "other texts; choose a draft model of the same family"
        )
    size, target_size = draft.info.vocab_size, target.info.vocab_size
    if size != target_size and (tokens is None or tokens != target_tokens):
        raise ConfigError(
            f"the draft model in {path} has {size:,} tokens, and the model has {target_size:,}; they must have the "
            "same tokenizer; choose a draft model of the same family"
        )


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokens(msgspec.Struct):
    """The ids of tokens in tokenizer.json. What splits texts into tokens does not matter to drafts."""

    model: dict[str, msgspec.Raw]
    added_tokens: list[_Added] = []


def _tokens_digest(path: Path) -> bytes | None:
    """Return a digest of the ids of all tokens; None if there is no tokenizer that can be read."""
    try:
        tokens = msgspec.json.decode((path / "tokenizer.json").read_bytes(), type=_Tokens)
        vocabulary = msgspec.json.decode(tokens.model["vocab"])
    except (OSError, KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    added = sorted((token.id, token.content) for token in tokens.added_tokens)
    return hashlib.sha256(msgspec.json.encode([vocabulary, added], order="deterministic")).digest()


class DraftModelDrafter(Drafter):
    """Computes the same tokens as the model, and then the likeliest next ones, one step for each draft.

    Of each slot, positions below `_num_computed` have keys and values of the sequence's own tokens. Of each block,
    that is true for the first `_num_filled` positions, for the tokens that the block has now.
    """

    def __init__(self, draft: DraftModel, target: Target) -> None:
        """Allocate the keys and values. Raises ConfigError if they do not fit into memory."""
        self._draft, self._table = draft, target.table
        loaded, cache = draft.loaded, target.cache
        self._decoder: Any = loaded.decoder
        cache_bytes = cache.num_blocks * draft.bytes_per_block
        remedy = "lower --kv-cache-memory-bytes or --num-kv-blocks, or choose a smaller draft model"
        with allocation_refused_as(f"the draft model's KV cache of {cache_bytes:,} bytes", loaded.device, remedy):
            self.cache = KVCache(
                loaded.layers,
                draft.attention.block_shapes,
                cache.num_blocks,
                cache.block_size,
                draft.attention.page_dtype,
                loaded.device,
            )
        self._max_length = min(loaded.info.max_model_len, target.table.row_length)
        self._vocab_size = target.loaded.info.vocab_size
        # Only where the draft model has fewer tokens, which its tokenizer then does not produce.
        self._max_token_id = loaded.info.vocab_size - 1 if loaded.info.vocab_size < self._vocab_size else None
        num_slots = len(target.table.num_blocks)
        self._num_computed = [0] * num_slots
        self._first = [0] * num_slots  # what was computed when it was assigned
        self._num_filled: NDArray[np.int64] = np.zeros(cache.num_blocks, dtype=np.int64)
        # By slot: the position of the first draft, and the drafts whose keys and values are computed.
        self._drafted: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._prompts: list[tuple[int, int, int]] = []  # (slot, start, end) of this step's prompt chunks
        self._demand = 0
        self._is_asked = False  # whether the newest plan asked for drafts
        self._no_mask = torch.zeros(1, 1, 1, 1, device=loaded.device)
        self._in_c = make_cpu_language_model(
            loaded.decoder, draft.head, draft.attention, self.cache, target.table, self._vocab_size
        )
        self._dtype_of_states = torch.empty(0, dtype=loaded.dtype, device=loaded.device)  # for rotations

    def begin(self, plan: StepPlan) -> None:
        if plan.copies:
            sources, targets = np.array(plan.copies).T
            self.cache.copy_blocks(*to_device([sources, targets], self._draft.loaded.device))
            self._num_filled[targets] = self._num_filled[sources]
        for _, block in plan.loads:  # a KV connector keeps the model's keys and values only
            self._num_filled[block] = 0
        for assignment in plan.slot_assignments:
            self._num_computed[assignment.slot] = self._first[assignment.slot] = _UNASSIGNED
            self._drafted.pop(assignment.slot, None)
        self._prompts = []
        self._demand = min(MAX_DEMAND, self._demand + 1) if self._is_asked else max(0, self._demand - 1)
        self._is_asked = False
        for chunk in plan.chunks:
            if not chunk.new_block_ids and not chunk.token_ids:
                continue  # as in most steps
            if self._num_computed[chunk.slot] == _UNASSIGNED:
                self._assign(chunk)
            elif chunk.new_block_ids:
                self._num_filled[list(chunk.new_block_ids)] = 0
            num_known = min(len(chunk.token_ids), chunk.num_tokens - chunk.num_drafts)
            end = chunk.start + num_known
            # A single token is computed with the drafts after it. A chunk that ends early is left out also if its
            # prompt goes on: a step's limit often divides short prompts.
            if num_known > 1 and end > MAX_LEFT_OUT_TOKENS:
                self._prompts.append((chunk.slot, chunk.start, end))

    @property
    def _is_wanted(self) -> bool:
        """Whether drafts are wanted, and not only tried."""
        return self._demand >= MIN_DEMAND

    def _assign(self, chunk: ScheduledChunk) -> None:
        """Take over a slot's first chunk.

        Positions before it are in the prefix cache, or were copied from another block. The rest of the blocks is new.
        """
        block_size, block_ids = self.cache.block_size, np.array(chunk.new_block_ids, dtype=np.int64)
        num_cached = np.clip(chunk.start - np.arange(len(block_ids)) * block_size, 0, block_size)  # of each block
        num_filled = np.minimum(self._num_filled[block_ids], num_cached)
        is_written = num_cached < block_size
        self._num_filled[block_ids[is_written]] = num_filled[is_written]
        lacking = np.flatnonzero(num_filled < num_cached)
        first = chunk.start if not len(lacking) else int(lacking[0]) * block_size + int(num_filled[lacking[0]])
        self._num_computed[chunk.slot] = self._first[chunk.slot] = first

    def _set_computed(self, slot: int, num_computed: int) -> None:
        """Set how far a slot is computed, and what its blocks have.

        A block that is shared with another sequence may have more; then some positions are computed twice.
        """
        block_size, before = self.cache.block_size, self._num_computed[slot]
        self._num_computed[slot] = num_computed
        first, stop = min(before, num_computed) // block_size, -(-max(before, num_computed) // block_size)
        if stop - first == 1:  # as in most steps; numpy takes longer for a few numbers
            self._num_filled[self._table.block_tables[slot, first]] = num_computed - first * block_size
            return
        numbers = np.arange(first, stop)
        block_ids = self._table.block_tables[slot, numbers]
        self._num_filled[block_ids] = np.clip(num_computed - numbers * block_size, 0, block_size)

    def commit(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        first, drafts = self._drafted.pop(slot, (-1, ())) if self._drafted else (-1, ())
        # Tokens before the first chunk are in the prefix cache, also if they are named only now.
        computed = max(min(self._num_computed[slot], start), self._first[slot])
        if first == start == computed:
            for draft, token_id in zip(drafts, token_ids, strict=False):
                if draft != token_id:
                    break
                computed += 1
        if computed != self._num_computed[slot]:
            self._set_computed(slot, computed)

    def compute_prompts(self) -> None:
        prompts, self._prompts = self._prompts, []
        spans, num_left = [], MAX_CATCH_UP_TOKENS
        for slot, start, end in prompts:
            first = self._num_computed[slot]
            num_missed = max(0, start - first)
            if first < 0 or num_missed > num_left:
                continue  # missing positions are computed when drafts are made
            num_left -= num_missed
            spans.append((slot, first, min(end, self._max_length)))
        self._compute([span for span in spans if span[1] < span[2]])

    def prepare(self, requests: list[DraftRequest]) -> None:
        """Compute the positions that sequences lack, except the last ones, which are computed with the drafts."""
        self._is_asked = True
        spans, num_left = [], MAX_WANTED_CATCH_UP_TOKENS if self._is_wanted else MAX_CATCH_UP_TOKENS
        for request in requests:
            start = self._num_computed[request.slot]
            stop = min(request.num_tokens - 1, start + num_left)
            if request.num_tokens - start > MAX_LACKING and 0 <= start < stop and self._num_drafts(request):
                num_left -= stop - start
                spans.append((request.slot, start, stop))
        self._compute(spans)

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        wanted = [self._num_drafts(request) for request in requests]
        spans, drafting = [], []
        for index, request in enumerate(requests):
            if not wanted[index]:
                continue
            # The newest token is computed again if its successor was not valid, because it is what drafts follow.
            start = min(self._num_computed[request.slot], request.num_tokens - 1)
            if request.num_tokens - start > MAX_LACKING:
                continue  # the next steps compute it
            spans.append((request.slot, start, request.num_tokens))
            drafting.append((wanted[index], index))
        drafts: list[tuple[int, ...]] = [()] * len(requests)
        if not spans:
            return drafts
        # Sequences that want more drafts come first: each step computes the first rows of the one before.
        order = sorted(range(len(spans)), key=lambda place: -drafting[place][0])
        spans, drafting = [spans[place] for place in order], [drafting[place] for place in order]
        tokens = self._compute(spans, [number for number, _ in drafting])
        for row, (_, index) in enumerate(drafting):
            drafts[index] = tuple(tokens[row])
            self._drafted[requests[index].slot] = (requests[index].num_tokens, drafts[index][:-1])
        return drafts

    def _num_drafts(self, request: DraftRequest) -> int:
        """Return how many drafts the sequence's blocks and the draft model's context have room for.

        The last draft is not computed, so the position after it needs no room.
        """
        table = self._table
        room = min(int(table.num_blocks[request.slot]) * table.block_size, self._max_length)
        return max(0, min(request.max_drafts, room - request.num_tokens + 1))

    def _compute(self, spans: list[tuple[int, int, int]], numbers: list[int] | None = None) -> list[list[int]]:
        """Compute positions [start, stop) of slots; return so many drafts after each, the largest number first."""
        if not spans:
            return []
        for slot, _, stop in spans:
            self._set_computed(slot, stop)
            self._drafted.pop(slot, None)
        in_c, num_tokens = self._in_c, sum(stop - start for _, start, stop in spans)
        if in_c is not None and num_tokens <= in_c.max_tokens:
            wanted = [0] * len(spans) if numbers is None else numbers
            return in_c.continue_greedily([(*span, number) for span, number in zip(spans, wanted, strict=True)])
        first = self._first_drafts(spans)
        return [] if numbers is None else self._continue(first, spans, numbers)

    def _first_drafts(self, spans: list[tuple[int, int, int]]) -> Tensor:
        """Compute spans; return the likeliest token [num_spans] after each."""
        chunks = tuple(ScheduledChunk(slot, start, stop - start, (), (), samples=True) for slot, start, stop in spans)
        batch = make_batch(StepPlan(0, 0, (), chunks), self._table)
        return self._likeliest(batch.input_ids, batch.position_ids, batch.attention, batch.logits_indices)

    def _continue(self, first: Tensor, spans: list[tuple[int, int, int]], numbers: list[int]) -> list[list[int]]:
        """Return `numbers` drafts for each span, the largest number first. `first` is the first draft of each."""
        num_steps = numbers[0] - 1
        drafts = [first]
        if num_steps > 0:
            steps = self._lay_out_steps(spans, num_steps)
            rotations = self._rotations(steps.positions)
            for step in range(num_steps):
                num_rows = sum(number > step + 1 for number in numbers)
                positions, attention = steps.first_rows(step, num_rows)
                of_step = None if rotations is None else _first_rows(rotations, step, num_rows)
                drafts.append(self._likeliest(drafts[-1][:num_rows], positions, attention, None, of_step))
        num_rows = len(spans)
        columns = [draft.tolist() + [-1] * (num_rows - len(draft)) for draft in drafts]
        return [list(row[:number]) for row, number in zip(zip(*columns, strict=True), numbers, strict=True)]

    def _lay_out_steps(self, spans: list[tuple[int, int, int]], num_steps: int) -> _Steps:
        """Lay out steps of one token for each span, from its end on, all at once: one copy to the device."""
        table, block_size = self._table, self._table.block_size
        slots = np.array([slot for slot, _, _ in spans])
        ends = np.array([stop for _, _, stop in spans])
        positions = ends + np.arange(num_steps)[:, None]
        # Rows that want fewer drafts have no blocks for the last positions, and are not in these steps.
        blocks = table.block_tables[slots, np.minimum(positions // block_size, table.block_tables.shape[1] - 1)]
        width = min(-(-int(ends.max() + num_steps) // block_size), table.block_tables.shape[1])
        arrays = [
            positions,
            (positions + 1).astype(np.int32),
            blocks.astype(np.int64) * block_size + positions % block_size,
            table.block_tables[slots, :width],
            np.arange(len(spans) + 1, dtype=np.int32),
        ]
        return _Steps(block_size, positions + 1, *to_device(arrays, self._draft.loaded.device))

    def _rotations(self, positions: Tensor) -> list[Rotation] | None:
        """Return cosines and sines [num_steps, num_rows, head_dim] for positions [num_steps, num_rows], in one call.

        None where the draft model's own layers compute them.
        """
        if not isinstance(self._decoder, FusedDecoder):
            return None
        rotations = self._decoder.rotations(self._dtype_of_states, positions.reshape(1, -1))
        return [(cosines.view(*positions.shape, -1), sines.view(*positions.shape, -1)) for cosines, sines in rotations]

    def _likeliest(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionMetadata,
        indices: Tensor | None,
        rotations: list[Rotation] | None = None,
    ) -> Tensor:
        """Return the likeliest next tokens [num_indices] int64; of all tokens without `indices`.

        The decoder and its head are called and not the model. Models may scale or cap logits after the head, but this
        keeps their order. For a small draft model, the code around the layers takes longer than the layers.
        """
        if self._max_token_id is not None:
            input_ids = input_ids.clamp(max=self._max_token_id)
        paged = PagedStep(self._draft.attention, self.cache, attention, indices)
        if rotations is not None:
            hidden_states = self._decoder.compute(self._decoder.embed(input_ids), rotations, paged)
        else:
            hidden_states = self._decoder(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                attention_mask=self._no_mask,
                use_cache=False,
                paged=paged,
            ).last_hidden_state[0]
        if indices is not None:
            hidden_states = hidden_states[indices]
        logits: Tensor = self._draft.head(hidden_states)
        return logits[:, : self._vocab_size].argmax(-1)


def _first_rows(rotations: list[Rotation], step: int, num_rows: int) -> list[Rotation]:
    return [(cosines[step, :num_rows], sines[step, :num_rows]) for cosines, sines in rotations]


@dataclass(frozen=True, slots=True)
class _Steps:
    """The inputs of steps of one token for each row, on the device."""

    block_size: int
    num_keys: NDArray[np.int64]  # [num_steps, num_rows] on the host
    positions: Tensor  # [num_steps, num_rows]
    lengths: Tensor  # [num_steps, num_rows] int32
    slot_mapping: Tensor  # [num_steps, num_rows] int64
    block_table: Tensor  # [num_rows, width] int32
    query_starts: Tensor  # [num_rows + 1] int32

    def first_rows(self, step: int, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """Return the positions and the metadata of the first rows in a step."""
        return self.positions[step, :num_rows], AttentionMetadata(
            self.block_size,
            np.ones(num_rows, dtype=np.int64),
            self.num_keys[step, :num_rows],
            self.query_starts[: num_rows + 1],
            self.lengths[step, :num_rows],
            self.block_table[:num_rows],
            self.slot_mapping[step, :num_rows],
        )
