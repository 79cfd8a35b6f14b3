"""Run a transformers model over texts of any length.

Texts are put one after the other in one row, without any padding, where the model is of a family whose layers work
token by token but for attention (BERT, RoBERTa and their like): attention is computed for the texts of one length at a
time. On a CPU, the layers are fused. Before the first request, this is compared with transformers' own padded
computation. All other models compute texts of nearly the same length together, with padding and a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from servekit.protocol.prediction import TextItem, padded_length
from workers.layers.fused_encoder import FusedEncoder, fuse_encoder
from workers.prediction.pooling import HiddenStates

log = logging.getLogger("servekit.worker")

ROW_ATTENTION = "servekit_row"  # the name of `attend_in_row` in transformers
# Families that can compute a row: the first position of each is 0, or the one after that of padding.
ROW_FAMILIES = {"bert": False, "camembert": True, "roberta": True, "xlm-roberta": True}
MERGE_TOKENS = 64  # a group of texts joins the next longer one, if that adds at most so many tokens of padding
CHECK_LENGTHS = (5, 3, 5, 9)
NUM_COPIES = 8  # of the last of these texts, for the check of each layer
TOLERANCE = 1e-3  # of the check, relative to the largest value; errors of the row are of another kind than rounding


@dataclass(frozen=True, slots=True)
class _Run:
    """Texts of one length, which follow each other in the row."""

    start: int
    num_texts: int
    length: int

    def texts_of(self, row: Tensor) -> Tensor:
        """Return its texts of a row: [num_tokens, ...] becomes [num_texts, length, ...]. Nothing is copied."""
        return row[self.start : self.start + self.num_texts * self.length].view(
            self.num_texts, self.length, *row.shape[1:]
        )


class _Row:
    """The runs of the row that is being computed. A worker computes one at a time."""

    runs: list[_Run]


_row = _Row()


def attend_in_row(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attend within each text of the row. Tensors are [1, heads, num_tokens, head_size]."""
    outputs = []
    for run in _row.runs:
        q, k, v = (run.texts_of(each[0].transpose(0, 1)).transpose(1, 2) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scaling)  # [num_texts, heads, length, head_size]
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


AttentionInterface.register(ROW_ATTENTION, attend_in_row)


def attend_in_texts(qkv: Tensor, scale: float) -> Tensor:
    """Attend within each text of the row, as `attend_in_row`, with qkv [num_tokens, 3, num_heads, head_size]."""
    outputs = []
    for run in _row.runs:
        q, k, v = run.texts_of(qkv).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale)
        outputs.append(attended.transpose(1, 2).reshape(run.num_texts * run.length, -1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class TextModel:
    """A model of texts: an encoder, or one with a head for sequence classification."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = model.config
        self._config.use_cache = False  # of decoders: nothing is generated
        self._has_types = (getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self._own_attention: str = model.config._attn_implementation
        self.num_computed_tokens = 0  # with padding, since the start
        self.uses_row = False
        self._encoder: FusedEncoder | None = None  # None: transformers' code runs the layers
        if model.config.model_type in ROW_FAMILIES:
            self._choose_row()

    def hidden_states(self, items: Sequence[TextItem]) -> Iterator[HiddenStates]:
        """Yield the last hidden states of all items, those of nearly one length together."""
        if self.uses_row:
            row, order, runs = self._compute_row(self._model, items)
            for run in runs:
                indices, order = order[: run.num_texts], order[run.num_texts :]
                yield _hidden(items, indices, run.texts_of(row))
            return
        for indices in length_groups([len(item.token_ids) for item in items]):
            output = self._model(**self._padded([items[index] for index in indices]))
            yield _hidden(items, indices, output.last_hidden_state)

    def logits(self, items: Sequence[TextItem]) -> Tensor:
        """Return the numbers for the labels of all items, [num_items, num_labels], of a classification model."""
        if self.uses_row:
            row, order, runs = self._compute_row(self._model.base_model, items)
            starts = [run.start + number * run.length for run in runs for number in range(run.num_texts)]
            logits, indices = self._head(row[starts]), order
        else:
            groups = length_groups([len(item.token_ids) for item in items])
            parts = [self._model(**self._padded([items[index] for index in group])).logits for group in groups]
            logits, indices = torch.cat(parts), [index for group in groups for index in group]
        placed = torch.empty_like(logits)
        placed[indices] = logits
        return placed.float()

    def _head(self, first_tokens: Tensor) -> Tensor:
        """Apply the head, which looks at the first token only: [num_items, hidden_size] become logits."""
        hidden = first_tokens[:, None]
        model: Any = self._model
        pooler = getattr(model.base_model, "pooler", None)
        logits: Tensor = model.classifier(hidden if pooler is None else pooler(hidden))
        return logits

    def _compute_row(self, model: Any, items: Sequence[TextItem]) -> tuple[Tensor, list[int], list[_Run]]:
        """Return the hidden states of all tokens, [num_tokens, hidden_size], the order of the items, and the runs."""
        lengths = [len(item.token_ids) for item in items]
        order = sorted(range(len(items)), key=lengths.__getitem__)
        runs, start = [], 0
        for length, run in groupby(lengths[index] for index in order):
            num_texts = len(list(run))
            runs.append(_Run(start, num_texts, length))
            start += num_texts * length
        _row.runs = runs
        first = self._config.pad_token_id + 1 if ROW_FAMILIES[self._config.model_type] else 0
        positions = torch.cat([torch.arange(first, first + run.length).repeat(run.num_texts) for run in runs])
        token_ids = torch.tensor([token_id for index in order for token_id in items[index].token_ids])
        types = torch.zeros_like(token_ids)
        if self._has_types and any(item.num_first for item in items):
            types = torch.tensor([kind for index in order for kind in _types(items[index])])
        inputs = {"input_ids": token_ids, "position_ids": positions, "token_type_ids": types}
        inputs = {name: values[None].to(self._model.device) for name, values in inputs.items()}
        self.num_computed_tokens += start
        if self._encoder is None:
            return model(**inputs).last_hidden_state[0], order, runs
        return self._encoder.compute(model.embeddings(**inputs)[0]), order, runs

    def _padded(self, items: Sequence[TextItem]) -> dict[str, Tensor]:
        """Return the inputs of texts with padding, and a mask over it."""
        longest = max(len(item.token_ids) for item in items)
        pad_id = getattr(self._config, "pad_token_id", None) or 0
        missing = [longest - len(item.token_ids) for item in items]
        inputs = {
            "input_ids": [[*item.token_ids, *[pad_id] * num] for item, num in zip(items, missing, strict=True)],
            "attention_mask": [[1] * len(item.token_ids) + [0] * num for item, num in zip(items, missing, strict=True)],
        }
        if self._has_types:
            inputs["token_type_ids"] = [[*_types(item), *[0] * num] for item, num in zip(items, missing, strict=True)]
        self.num_computed_tokens += longest * len(items)
        return {name: torch.tensor(rows).to(self._model.device) for name, rows in inputs.items()}

    @torch.inference_mode()
    def _choose_row(self) -> None:
        """Compute rows from now on, and with fused layers, if both give what transformers' own computation gives."""
        vocab_size = self._config.vocab_size
        items = [
            TextItem(tuple(7 * (index + position) % vocab_size for position in range(1, length + 1)), num_first=2)
            for index, length in enumerate(CHECK_LENGTHS)
        ]
        expected = self._numbers(items)
        precision = torch.finfo(expected.dtype).eps / torch.finfo(torch.float32).eps
        tolerance = TOLERANCE * max(1.0, precision**0.5 / 8)
        self.uses_row = True
        error = self._error(items, expected)
        if not error <= tolerance:
            log.warning("texts are computed with padding: without, hidden states differ by %.2g", error)
            self.uses_row = False
            self._model.set_attn_implementation(self._own_attention)
            return
        base: Any = self._model.base_model
        # So many rows that a layer's products are those of many rows; below, they are those of few.
        token_ids = torch.tensor([items[-1].token_ids], device=self._model.device)
        hidden = base.embeddings(token_ids).repeat(1, NUM_COPIES, 1)
        _row.runs = [_Run(0, NUM_COPIES, CHECK_LENGTHS[-1])]
        self._encoder = fuse_encoder(base.encoder.layer, attend_in_texts, hidden, tolerance)
        if self._encoder is not None and not (error := self._error(items, expected)) <= tolerance:
            log.warning("transformers' code runs the layers: without, hidden states differ by %.2g", error)
            self._encoder = None

    def _error(self, items: Sequence[TextItem], expected: Tensor) -> float:
        """Return the largest difference of the row's numbers from those expected, relative to the largest of them."""
        try:
            self._model.set_attn_implementation(ROW_ATTENTION)
            found = self._numbers(items)
        except Exception as failure:  # a variant of the family that takes other inputs
            log.debug("the model computes no row: %s", failure)
            return float("inf")
        return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()

    def _numbers(self, items: Sequence[TextItem]) -> Tensor:
        """Return logits, or the hidden states of all tokens."""
        return self.logits(items) if hasattr(self._model, "classifier") else self._all_hidden(items)

    def _all_hidden(self, items: Sequence[TextItem]) -> Tensor:
        texts: dict[int, Tensor] = {}
        for hidden in self.hidden_states(items):
            for number, index in enumerate(hidden.indices):
                texts[index] = hidden.values[number, : hidden.lengths[number]]
        return torch.cat([texts[index] for index in range(len(items))])


def length_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of texts that are computed together, with little padding: those of one padded length.

    A group joins the next longer one if that adds few tokens, because each group costs a pass through all layers.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    for _, same in groupby(order, key=lambda index: padded_length(lengths[index])):
        group = list(same)
        if groups and len(groups[-1]) * (lengths[group[-1]] - lengths[groups[-1][-1]]) <= MERGE_TOKENS:
            groups[-1] += group
        else:
            groups.append(group)
    return groups


def _hidden(items: Sequence[TextItem], indices: list[int], values: Tensor) -> HiddenStates:
    lengths = [len(items[index].token_ids) for index in indices]
    return HiddenStates(indices, values, lengths, [items[index].num_unpooled for index in indices])


def _types(item: TextItem) -> list[int]:
    num_first = item.num_first or len(item.token_ids)
    return [0] * num_first + [1] * (len(item.token_ids) - num_first)
