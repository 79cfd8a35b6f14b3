"""Draft with Medusa heads on the model's last hidden state; each head guesses the token one position further ahead.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024. The drafts are one
chain, the likeliest token of each head, and no tree: a tree's branches would share positions, and each position of a
sequence has one place in its blocks.

A head is one or more residual blocks, x + silu(W x + b), and a matrix of its own that gives logits. Or the heads use
the model's own matrix (`original_lm_head`), and take little memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel, StepPlan
from workers.batch import Batch
from workers.device.memory import allocation_refused_as
from workers.device.transfer import to_device
from workers.loading.model_manager import LoadedModel
from workers.speculation.drafter import Drafter, DraftRequest, HiddenStates, Target

FILES = ("medusa_lm_head.safetensors", "model.safetensors")
PICKLED_FILE = "medusa_lm_head.pt"
MAX_HEADS = 16
MAX_BLOCKS = 8  # of a head
FLOATS = {"F32", "F16", "BF16"}  # as safetensors names data types
# Part number `part` of head number `head`: residual blocks, and then the matrix. Some files have a prefix.
_PUBLISHED = re.compile(
    r"(?:medusa_head\.)?(?P<head>\d{1,4})\.(?P<part>\d{1,4})\.(?P<name>linear\.weight|linear\.bias|weight)"
)
# The same tensors as vLLM names them.
_BLOCK = re.compile(r"blocks\.(?P<head>\d{1,4})\.layers\.(?P<part>\d{1,4})\.(?P<name>weight|bias)")
_HEAD = re.compile(r"lm_heads\.(?P<head>\d{1,4})\.weight")


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """The weights of all heads, in the model's data type and on its device."""

    blocks: tuple[tuple[Tensor, Tensor], ...]  # weights [num_heads, size, size] and biases [num_heads, 1, size]
    matrix: Tensor | None  # [num_heads, vocab_size, size]; None where the heads use the model's own
    model_head: nn.Module | None  # the model's own; None where the heads have theirs

    bytes_per_block: int = 0  # they keep no keys and values

    @property
    def num_heads(self) -> int:
        return len(self.blocks[0][0])

    def likeliest(self, hidden_states: Tensor, num_heads: int) -> Tensor:
        """Return the likeliest token [num_rows, num_heads] of the first heads for hidden states [num_rows, size]."""
        x = hidden_states.expand(num_heads, *hidden_states.shape)
        for weights, biases in self.blocks:
            x = x + F.silu(torch.baddbmm(biases[:num_heads], x, weights[:num_heads].mT))
        if self.matrix is not None:
            logits = x @ self.matrix[:num_heads].mT
        else:
            assert self.model_head is not None
            logits = self.model_head(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return logits.argmax(-1).T

    def make_drafter(self, target: Target) -> MedusaDrafter:
        """Return the drafter."""
        return MedusaDrafter(self, len(target.table.num_blocks))


class MedusaDrafter(Drafter):
    """Keeps the hidden states of each slot's last step, and applies the heads to the newest token's."""

    hidden_states = HiddenStates()

    def __init__(self, heads: MedusaHeads, num_slots: int) -> None:
        """Reserve the rows of all slots, so that the memory is bounded."""
        self._heads = heads
        self._rows_each = 1 + heads.num_heads
        weights, _ = heads.blocks[0]
        self._states = weights.new_zeros(num_slots * self._rows_each, weights.shape[-1])
        self._known: dict[int, tuple[int, int]] = {}  # by slot: the position of the first row's token, number of rows

    def begin(self, plan: StepPlan) -> None:
        for assignment in plan.slot_assignments:
            self._known.pop(assignment.slot, None)

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = [()] * len(requests)
        places, cells = [], []
        for place, request in enumerate(requests):
            # The row, of those that the last step verified, from which the newest token was chosen.
            first, num_rows = self._known.get(request.slot, (0, 0))
            row = request.num_tokens - 1 - first
            if 0 <= row < num_rows:
                places.append(place)
                cells.append(request.slot * self._rows_each + row)
        if not places:
            return drafts
        num_heads = min(self._heads.num_heads, max(requests[place].max_drafts for place in places))
        (indices,) = to_device([np.array(cells)], self._states.device)
        guesses = self._heads.likeliest(self._states[indices], num_heads).tolist()
        for place, tokens in zip(places, guesses, strict=True):
            drafts[place] = tuple(tokens[: requests[place].max_drafts])
        return drafts

    def observe(self, batch: Batch, hidden_states: Tensor) -> None:
        firsts: dict[int, int] = {}
        rows, cells = [], []
        for index, sampled in enumerate(batch.sampling):
            row = sampled.position - firsts.setdefault(sampled.slot, sampled.position)
            # More rows than heads come only from drafts that were not made here. After them, there is one step without
            # drafts.
            if row < self._rows_each:
                rows.append(index)
                cells.append(sampled.slot * self._rows_each + row)
                self._known[sampled.slot] = (sampled.position - row, row + 1)
        if cells:
            indices, targets = to_device([np.array(rows), np.array(cells)], self._states.device)
            self._states.index_copy_(0, targets, hidden_states[indices])


def load_medusa_heads(target: LoadedModel, settings: LoadModel) -> MedusaHeads:
    """Read the heads that `settings.speculative` names. Raises ConfigError for files that do not fit the model."""
    directory = Path(settings.speculative.directory(settings.model_path))
    file = _find_file(directory)
    size = int(target.model.config.get_text_config().hidden_size)
    try:
        with safe_open(file, framework="pt") as opened:
            layout = _read_layout(file, opened.keys())
            shapes = {name: opened.get_slice(name) for name in layout}
            _check_shapes(file, layout, shapes, size, target.info.vocab_size)
            remedy = "use fewer heads, or a device with more memory"
            with allocation_refused_as("the Medusa heads' weights", target.device, remedy):
                return _read_heads(opened, layout, target)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a safetensors file that can be read: {error}") from None


class _Part(NamedTuple):
    """What a tensor is: of residual block number `block` of a head, or, without a block, the matrix of a head."""

    head: int
    block: int | None
    is_bias: bool


def _find_file(directory: Path) -> Path:
    for name in FILES:
        if (directory / name).is_file():
            return directory / name
    if (directory / PICKLED_FILE).is_file():
        raise ConfigError(
            f"{directory / PICKLED_FILE} is a pickle, which can run code when it is read, so it is not read. Convert "
            "it: import torch, safetensors.torch; "
            "safetensors.torch.save_file(torch.load('medusa_lm_head.pt', weights_only=True), "
            "'medusa_lm_head.safetensors')"
        )
    raise ConfigError(
        f"--speculative medusa: {directory} holds neither {FILES[0]} nor {FILES[1]}; name the directory of the heads, "
        "as in --speculative medusa:PATH"
    )


def _read_layout(file: Path, names: list[str]) -> dict[str, _Part]:
    """Return what each tensor is, by name. Raises ConfigError for tensors that are no part of a Medusa head."""
    numbers = [_PUBLISHED.fullmatch(name) for name in names]
    layout: dict[str, _Part] = {}
    for name, published in zip(names, numbers, strict=True):
        block, head = _BLOCK.fullmatch(name), _HEAD.fullmatch(name)
        if published and published["name"] == "weight":
            layout[name] = _Part(int(published["head"]), None, is_bias=False)
        elif published:
            is_bias = published["name"] == "linear.bias"
            layout[name] = _Part(int(published["head"]), int(published["part"]), is_bias)
        elif block:
            layout[name] = _Part(int(block["head"]), int(block["part"]), block["name"] == "bias")
        elif head:
            layout[name] = _Part(int(head["head"]), None, is_bias=False)
        else:
            raise ConfigError(f"{file} holds {name[:200]!r}, which is no part of a Medusa head")
    _check_complete(file, set(layout.values()), len(layout))
    return layout


def _check_complete(file: Path, parts: set[_Part], num_tensors: int) -> None:
    """Raise ConfigError unless every head has the same blocks, each with weight and bias, and all or none a matrix."""
    num_heads = len({part.head for part in parts})
    num_blocks = len({part.block for part in parts if part.block is not None})
    if not 1 <= num_heads <= MAX_HEADS or not 1 <= num_blocks <= MAX_BLOCKS:
        raise ConfigError(
            f"{file} holds {num_heads} Medusa heads of {num_blocks} residual blocks; servekit reads 1 to {MAX_HEADS} "
            f"heads of 1 to {MAX_BLOCKS} blocks"
        )
    blocks = {
        _Part(head, block, is_bias)
        for head in range(num_heads)
        for block in range(num_blocks)
        for is_bias in (False, True)
    }
    matrices = {_Part(head, None, is_bias=False) for head in range(num_heads)}
    if parts not in (blocks, blocks | matrices) or num_tensors != len(parts):
        raise ConfigError(
            f"{file} holds {num_tensors} tensors, which are not those of {num_heads} Medusa heads: each head has the "
            f"same number of residual blocks with a weight and a bias, and all heads have a matrix, or none of them"
        )


def _check_shapes(
    file: Path, layout: Mapping[str, _Part], tensors: Mapping[str, Any], size: int, vocab_size: int
) -> None:
    for name, part in layout.items():
        shape, kind = list(tensors[name].get_shape()), tensors[name].get_dtype()
        wanted = [vocab_size, size] if part.block is None else [size] if part.is_bias else [size, size]
        if shape != wanted or kind not in FLOATS:
            raise ConfigError(
                f"{file}: {name[:200]} has the shape {shape} in {kind}, and for this model it must be {wanted} in "
                f"{', '.join(sorted(FLOATS))}; these heads belong to another model"
            )


def _read_heads(opened: Any, layout: Mapping[str, _Part], target: LoadedModel) -> MedusaHeads:
    names = {part: name for name, part in layout.items()}
    num_heads = 1 + max(part.head for part in names)
    num_blocks = 1 + max(part.block for part in names if part.block is not None)

    def stacked(block: int | None, is_bias: bool = False) -> Tensor:
        of_heads = [opened.get_tensor(names[_Part(head, block, is_bias)]) for head in range(num_heads)]
        return torch.stack([tensor.to(target.device, target.dtype) for tensor in of_heads])

    blocks = tuple((stacked(block), stacked(block, is_bias=True)[:, None]) for block in range(num_blocks))
    if _Part(0, None, is_bias=False) in names:
        return MedusaHeads(blocks, stacked(None), None)
    model_head = target.model.get_output_embeddings()
    if model_head is None:
        raise ConfigError(
            f"the Medusa heads have no matrices of their own, and transformers names no output head of "
            f"{target.info.architecture}; use heads with matrices"
        )
    return MedusaHeads(blocks, None, model_head)
