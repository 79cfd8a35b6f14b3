"""Claims about sampling, against transformers' logits processors and counted draws."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from workers.sampler import SamplingRow, sample, uniform


def row(**changes: float) -> SamplingRow:
    return SamplingRow(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "position": 0, **changes})


def logits_of(num_rows: int, vocab_size: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def test_uniform_numbers_are_uniform_and_never_one() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(1000)])
    counts = torch.histc(numbers, bins=100, min=0.0, max=1.0)
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 160, "99 degrees of freedom; 160 has p < 1e-4"
    assert numbers.min() >= 0.0 and max(uniform(s, 0) for s in range(1000)) < 1.0
    assert uniform(-1, 3) == uniform(2**64 - 1, 3) != uniform(0, 3)


def test_temperature_zero_is_greedy() -> None:
    logits = logits_of(5)
    assert sample(logits, [row(temperature=0.0)] * 5).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, [row(temperature=1e-30, top_p=0.5)] * 5).tolist() == logits.argmax(-1).tolist()


def test_a_row_is_sampled_alike_whatever_shares_its_batch() -> None:
    logits = logits_of(6)
    rows = [
        row(seed=1, position=9),
        row(temperature=0.0),
        row(top_k=5, seed=2, position=3),
        row(top_p=0.7, seed=3, position=4),
        row(temperature=0.3, top_k=7, top_p=0.9, seed=4, position=5),
        row(temperature=2.0, seed=5, position=6),
    ]
    together = sample(logits, rows).tolist()
    alone = [sample(logits[i : i + 1], [rows[i]]).item() for i in range(6)]
    backwards = sample(logits.flip(0), rows[::-1]).flip(0).tolist()
    assert together == alone == backwards


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 8])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_draws_follow_the_distribution_of_transformers_processors(temperature: float, top_k: int, top_p: float) -> None:
    num_draws = 20_000
    logits = logits_of(1, vocab_size=30, seed=3)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    expected = torch.softmax(processors(torch.zeros(1, 1, dtype=torch.int64), logits.clone())[0].double(), -1)
    rows = [row(temperature=temperature, top_k=top_k, top_p=top_p, seed=11, position=i) for i in range(num_draws)]
    counts = torch.bincount(sample(logits.expand(num_draws, -1), rows), minlength=30).double()
    allowed = expected > 0
    assert counts[~allowed].sum() == 0, "a token outside the filter was drawn"
    likely = expected * num_draws >= 5
    chi_square = ((counts - expected * num_draws) ** 2 / (expected * num_draws))[likely].sum().item()
    degrees = max(int(likely.sum()) - 1, 1)
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 8, "five standard deviations"


def test_top_p_keeps_the_likeliest_token_however_small_it_is() -> None:
    logits = logits_of(1)
    assert sample(logits, [row(top_p=1e-9)]).item() == logits.argmax().item()
