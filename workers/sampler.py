"""From logits to token ids: greedy, temperature, top-k, top-p, min-p and typical-p, for a whole batch at once.

Randomness is a pure function of (seed, position): one uniform number for each sampled token, which inverts the
cumulative distribution. Nothing else enters, so a sequence samples the same tokens whatever shares its batch, and
again after a preemption or a restart, given the same logits. (A stateful generator would have to be saved and moved
along with each sequence; a counter needs neither. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from servekit.sampling_params import SamplingParams
from workers.staging import staged

_MASK64 = 2**64 - 1
MIN_TEMPERATURE = 1e-5  # below, dividing by it overflows; the result is the greedy one anyway


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is sampled. `position` is that of the token to come."""

    sampling: SamplingParams
    position: int
    slot: int = 0
    num_outputs: int = 0  # tokens of the answer before this one

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < MIN_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        sampling = self.sampling
        return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone: two rounds of the SplitMix64 finaliser."""
    return _mix(_mix(seed & _MASK64) ^ position) / 2**64


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    # The low bits go, so that dividing by 2**64 is exact and never rounds up to 1.
    return (state ^ (state >> 31)) & ~0x7FF


def sample(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Token ids [num_rows] for logits [num_rows, vocab_size]."""
    if logits.is_cuda and not all(row.is_greedy for row in rows) and all(_is_known_to_gpu(row) for row in rows):
        return _sample_on_gpu(logits, rows)
    token_ids = logits.argmax(dim=-1)
    plain = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
    filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    # Two passes, because only filtering needs the vocabulary sorted.
    if plain:
        token_ids[plain] = _invert(_probabilities(logits, rows, plain), rows, plain)
    if filtered:
        probabilities, order = _probabilities(logits, rows, filtered).sort(dim=-1, descending=True, stable=True)
        sampling = [rows[i].sampling for i in filtered]
        kept = _keep_typical(_keep_top(probabilities, sampling), sampling)
        ranks = _invert(kept, rows, filtered)
        token_ids[filtered] = order.gather(-1, ranks[:, None])[:, 0]
    return token_ids


def _is_known_to_gpu(row: SamplingRow) -> bool:
    return row.sampling.typical_p == 1.0


def _sample_on_gpu(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """The same choices without a sort of the vocabulary, and without waiting for the device."""
    from workers.triton_sampling import Filters, sample  # not at the top: Triton comes with torch for CUDA only

    of_rows = [row.sampling for row in rows]
    temperatures, uniforms, top_k, top_p, min_p = staged(
        [
            np.array([params.temperature for params in of_rows], dtype=np.float32),
            np.array([uniform(row.sampling.seed, row.position) for row in rows]),
            np.array([params.top_k for params in of_rows], dtype=np.int32),
            np.array([params.top_p for params in of_rows], dtype=np.float32),
            np.array([params.min_p for params in of_rows], dtype=np.float32),
        ],
        logits.device,
    )
    filters = Filters(top_k, top_p, min_p) if any(row.is_filtered for row in rows) else None
    return sample(logits, temperatures, uniforms, filters)


def _probabilities(logits: Tensor, rows: list[SamplingRow], chosen: list[int]) -> Tensor:
    """[num_chosen, vocab_size] in float64: a float32 cumulative sum over 10^5 entries is off by more than the tail."""
    temperature = torch.tensor(
        [rows[i].sampling.temperature for i in chosen], dtype=torch.float64, device=logits.device
    )
    return torch.softmax(logits[chosen].double() / temperature[:, None], dim=-1)


def _keep_top(probabilities: Tensor, sampling: list[SamplingParams]) -> Tensor:
    """Zero all but the top-k; of those, all but the smallest set that reaches top-p; of those, what min-p excludes.

    `probabilities` are sorted, largest first. The first one always stays. Nucleus sampling: Holtzman et al., "The
    Curious Case of Neural Text Degeneration", ICLR 2020, section 3.1. Min-p, a share of the largest: Nguyen et al.,
    "Turning Up the Heat", ICLR 2025, section 3.
    """
    vocab_size, device = probabilities.shape[-1], probabilities.device
    top_k = torch.tensor([params.top_k or vocab_size for params in sampling], device=device)
    top_p = _column([params.top_p for params in sampling], probabilities)
    min_p = _column([params.min_p for params in sampling], probabilities)
    kept = probabilities.masked_fill(torch.arange(vocab_size, device=device) >= top_k[:, None], 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    mass_before = kept.cumsum(dim=-1) - kept
    outside = (mass_before >= top_p) | (kept < min_p * kept[:, :1])
    outside[:, 0] = False
    return kept.masked_fill(outside, 0.0)


def _keep_typical(probabilities: Tensor, sampling: list[SamplingParams]) -> Tensor:
    """Zero all but those whose surprise is nearest to the mean surprise, up to typical-p of the mass.

    Need not be normalised, nor sorted. Meister et al., "Locally Typical Sampling", TACL 2023, section 4.
    """
    chosen = [i for i, params in enumerate(sampling) if params.typical_p < 1.0]
    if not chosen:
        return probabilities
    rows = probabilities[chosen] / probabilities[chosen].sum(dim=-1, keepdim=True)
    surprise = -rows.log()  # infinite where the probability is zero: those are last in the order below
    mean = torch.where(rows > 0, rows * surprise, 0.0).sum(dim=-1, keepdim=True)
    order = (surprise - mean).abs().argsort(dim=-1, stable=True)
    ordered = rows.gather(-1, order)
    typical_p = _column([sampling[i].typical_p for i in chosen], probabilities)
    outside = ordered.cumsum(dim=-1) - ordered >= typical_p
    outside[:, 0] = False
    kept = torch.zeros_like(rows).scatter(-1, order, ordered.masked_fill(outside, 0.0))
    return probabilities.index_copy(0, torch.tensor(chosen, device=probabilities.device), kept)


def _column(values: list[float], like: Tensor) -> Tensor:
    """[num_rows, 1]."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _invert(probabilities: Tensor, rows: list[SamplingRow], chosen: list[int]) -> Tensor:
    """The index at which each row's cumulative sum passes its uniform number; need not be normalised."""
    cumulative = probabilities.cumsum(dim=-1)
    numbers = [uniform(rows[i].sampling.seed, rows[i].position) for i in chosen]
    targets = torch.tensor(numbers, dtype=torch.float64, device=cumulative.device)[:, None] * cumulative[:, -1:]
    indices = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return indices.clamp_(max=probabilities.shape[-1] - 1)
