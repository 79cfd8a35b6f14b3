"""Choose token ids from logits: greedy, temperature, top-k, top-p, min-p and typical-p, for a whole batch at once.

Randomness is a pure function of (seed, position): one uniform number for each sampled token, which inverts the
cumulative distribution. Nothing else enters, so a sequence samples the same tokens whatever shares its batch, and
again after a preemption or a restart, given the same logits. (The state of a generator would have to be saved and moved
with each sequence; a counter needs neither. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011.)
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from servekit.protocol.sampling_params import SamplingParams
from workers.batch import SamplingRow
from workers.device.transfer import to_device
from workers.device.triton_support import kernel_errors, raise_device_failure, triton_failure

log = logging.getLogger("servekit.worker")

_MASK64 = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on (seed, position) alone: two rounds of the SplitMix64 finaliser."""
    return float(_uniforms_of([seed], [position])[0])


def _uniforms_of(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """Return `uniform` of each pair, all at once: one by one, 256 rows would take as long as a small model's step."""
    of_seeds = _mix(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
    return _mix(of_seeds ^ np.array(positions, dtype=np.uint64)) / 2.0**64


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a round of the finaliser for each number; sums and products are modulo 2**64."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    # The low bits are cleared, so that dividing by 2**64 is exact and never rounds up to 1.
    return (state ^ (state >> np.uint64(31))) & np.uint64(_MASK64 - 0x7FF)


def sample(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Return token ids [num_rows] for logits [num_rows, vocab_size]."""
    greedy = [row.is_greedy for row in rows]
    if logits.is_cuda and not all(greedy) and _triton_failure(logits.shape[1], logits.device) is None:
        token_ids = _sample_on_gpu(logits, rows)
        sorted_rows = [i for i, row in enumerate(rows) if not greedy[i] and not _is_known_to_gpu(row)]
        return _sample_sorted(logits, rows, sorted_rows, token_ids)
    token_ids = logits.argmax(dim=-1)
    plain = [i for i, row in enumerate(rows) if not greedy[i] and not row.is_filtered]
    filtered = [i for i, row in enumerate(rows) if not greedy[i] and row.is_filtered]
    # Two passes, because only filtering needs the vocabulary sorted.
    if plain:
        indices, probabilities, uniforms = _probabilities(logits, rows, plain)
        token_ids = token_ids.index_copy(0, indices, _invert(probabilities, uniforms))
    return _sample_sorted(logits, rows, filtered, token_ids)


def _sample_sorted(logits: Tensor, rows: list[SamplingRow], chosen: list[int], token_ids: Tensor) -> Tensor:
    """Return token ids [num_rows] in which the chosen rows' are sampled anew, with all filters."""
    if not chosen:
        return token_ids
    indices, probabilities, uniforms = _probabilities(logits, rows, chosen)
    probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
    sampling = [rows[i].sampling for i in chosen]
    kept = _keep_typical(_keep_top(probabilities, sampling), sampling)
    ranks = _invert(kept, uniforms)
    return token_ids.index_copy(0, indices, order.gather(-1, ranks[:, None])[:, 0])


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compile the kernels of a GPU, so that no request waits for that."""
    if device.type == "cuda":
        _triton_failure(vocab_size, device)


@cache
def _triton_failure(vocab_size: int, device: torch.device) -> str | None:
    """Return why the Triton sampler cannot be used for this vocabulary, after comparing it with torch's operations.

    They sort the vocabulary, which is slow. The log says why.
    """
    if (failure := triton_failure()) is not None:
        return failure
    generator = torch.Generator(device).manual_seed(0)
    plain = SamplingParams(max_tokens=1, temperature=0.7)
    filtered = (replace(plain, top_k=9), replace(plain, top_p=0.8), replace(plain, min_p=0.05))
    params = (plain, *filtered, replace(plain, top_k=40, top_p=0.9))
    rows = [SamplingRow(replace(each, seed=seed), 0) for seed in range(4) for each in params]
    # Where no row has a filter, another kernel runs. The last row is for that one. It is not one of the other rows too:
    # a number at a boundary would count twice.
    rows.append(SamplingRow(replace(plain, seed=4), 0))
    logits = 3.0 * torch.randn(len(rows), vocab_size, generator=generator, device=device)
    try:
        with torch.inference_mode():
            found = torch.cat([_sample_on_gpu(logits[some], rows[some]) for some in (slice(-1), slice(-1, None))])
            num_wrong = int((found.cpu() != sample(logits.cpu(), rows)).sum())
        # One may differ: at a boundary between two tokens, sums that are rounded differently give different ones.
        if num_wrong > 1:
            failure = f"{num_wrong} of {len(rows)} tokens are not those that torch's operations choose"
    except kernel_errors() as error:
        raise_device_failure(error)
        failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if failure is not None:
        log.warning("sampling is slow: it sorts the vocabulary, because Triton's kernels fail: %s", failure)
    return failure


def _is_known_to_gpu(row: SamplingRow) -> bool:
    """Return whether the Triton sampler has the row's filters: all but typical-p."""
    return row.sampling.typical_p == 1.0


def _sample_on_gpu(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Return the same token ids without sorting the vocabulary, ignoring typical-p."""
    from workers.sampling.triton_sampler import Filters, sample  # not at the top: Triton comes with torch for CUDA only

    of_rows = [row.sampling for row in rows]
    temperatures, uniforms, top_k, top_p, min_p = to_device(
        [
            np.array([params.temperature for params in of_rows], dtype=np.float32),
            _uniforms(rows),
            np.array([params.top_k for params in of_rows], dtype=np.int32),
            np.array([params.top_p for params in of_rows], dtype=np.float32),
            np.array([params.min_p for params in of_rows], dtype=np.float32),
        ],
        logits.device,
    )
    is_filtered = any(row.is_filtered and _is_known_to_gpu(row) for row in rows)
    return sample(logits, temperatures, uniforms, Filters(top_k, top_p, min_p) if is_filtered else None)


def _uniforms(rows: list[SamplingRow]) -> NDArray[np.float64]:
    return _uniforms_of([row.sampling.seed for row in rows], [row.position for row in rows])


def _probabilities(logits: Tensor, rows: list[SamplingRow], chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (`chosen` as a tensor, probabilities [num_chosen, vocab_size] in float64, uniform numbers [num_chosen]).

    float64, because a float32 cumulative sum over 10^5 entries is off by more than the tail.
    """
    of_rows = [rows[i] for i in chosen]
    temperature = np.array([[row.sampling.temperature] for row in of_rows])
    indices, temperatures, uniforms = to_device([np.array(chosen), temperature, _uniforms(of_rows)], logits.device)
    return indices, torch.softmax(logits.index_select(0, indices).double() / temperatures, dim=-1), uniforms


def _keep_top(probabilities: Tensor, sampling: list[SamplingParams]) -> Tensor:
    """Zero all but the top-k; of those, all but the smallest set that reaches top-p; of those, what min-p excludes.

    `probabilities` [num_rows, vocab_size] are sorted, largest first. The first one always stays.

    Nucleus sampling: Holtzman et al., "The
    Curious Case of Neural Text Degeneration", ICLR 2020, section 3.1. Min-p, a share of the largest: Nguyen et al.,
    "Turning Up the Heat", ICLR 2025, section 3.
    """
    vocab_size, device = probabilities.shape[-1], probabilities.device
    top_k, top_p, min_p = to_device(
        [
            np.array([params.top_k or vocab_size for params in sampling]),
            np.array([[params.top_p] for params in sampling]),
            np.array([[params.min_p] for params in sampling]),
        ],
        device,
    )
    kept = probabilities.masked_fill(torch.arange(vocab_size, device=device) >= top_k[:, None], 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    mass_before = kept.cumsum(dim=-1) - kept
    outside = (mass_before >= top_p) | (kept < min_p * kept[:, :1])
    outside[:, 0] = False
    return kept.masked_fill(outside, 0.0)


def _keep_typical(probabilities: Tensor, sampling: list[SamplingParams]) -> Tensor:
    """Zero all but the tokens whose surprise is nearest to the mean surprise, up to typical-p of the mass.

    `probabilities` [num_rows, vocab_size] need not be normalised, nor sorted.

    Meister et al., "Locally Typical Sampling", TACL 2023, section 4.
    """
    chosen = [i for i, params in enumerate(sampling) if params.typical_p < 1.0]
    if not chosen:
        return probabilities
    indices, typical_p = to_device(
        [np.array(chosen), np.array([[sampling[i].typical_p] for i in chosen])], probabilities.device
    )
    rows = probabilities.index_select(0, indices)
    rows = rows / rows.sum(dim=-1, keepdim=True)
    surprise = -rows.log()  # infinite where the probability is zero: those are last in the order below
    mean = torch.where(rows > 0, rows * surprise, 0.0).sum(dim=-1, keepdim=True)
    order = (surprise - mean).abs().argsort(dim=-1, stable=True)
    ordered = rows.gather(-1, order)
    outside = ordered.cumsum(dim=-1) - ordered >= typical_p
    outside[:, 0] = False
    kept = torch.zeros_like(rows).scatter(-1, order, ordered.masked_fill(outside, 0.0))
    return probabilities.index_copy(0, indices, kept)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the index [num_rows] at which each row's cumulative sum passes its uniform number.

    `probabilities` need not be normalised.
    """
    cumulative = probabilities.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    indices = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return indices.clamp_(max=probabilities.shape[-1] - 1)
