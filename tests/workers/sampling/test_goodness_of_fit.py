"""The claim that draws follow the expected distribution: all kinds of rows in one batch, by chi-square.

What is expected comes from transformers' logits warpers. Everything is fixed, so the result is the same each time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from servekit.protocol.sampling_params import SamplingParams
from workers.batch import SamplingRow
from workers.sampling.sampler import sample

NUM_DRAWS = 100_000  # of each kind
NUM_SEEDS = 100
VOCAB_SIZE = 40
MIN_P = 1e-3  # a correct sampler falls below for one kind in a thousand

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 9},
    {"top_p": 0.85},
    {"min_p": 0.05},
    {"typical_p": 0.9},
    {"temperature": 1.3, "top_k": 25, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
]


def expected_probabilities(logits: Tensor, kind: dict[str, Any]) -> Tensor:
    """Return probabilities [vocab_size] after transformers' warpers, in transformers' order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(kind.get("temperature", 1.0))])
    if "top_k" in kind:
        warpers.append(TopKLogitsWarper(kind["top_k"]))
    if "top_p" in kind:
        warpers.append(TopPLogitsWarper(kind["top_p"]))
    if "min_p" in kind:
        warpers.append(MinPLogitsWarper(kind["min_p"]))
    if "typical_p" in kind:
        warpers.append(TypicalLogitsWarper(kind["typical_p"]))
    return torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0].double(), dim=-1)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Return the p-value of counts [n] given `expected` [n], by Wilson and Hilferty's normal approximation (1931)."""
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    degrees = len(counts) - 1
    spread = 2 / (9 * degrees)
    z = ((chi_square / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5
    return 0.5 * math.erfc(z / 2**0.5)


def draw_counts(logits: Tensor) -> Tensor:
    """Return counts [num_kinds, vocab_size]: the kinds row by row in turn, each row with its own seed and position."""
    counts = torch.zeros(len(KINDS), VOCAB_SIZE, dtype=torch.float64)
    seeds = range(NUM_SEEDS)
    params = [[SamplingParams(max_tokens=1, seed=s * 7 + i, **kind) for i, kind in enumerate(KINDS)] for s in seeds]
    for position in range(NUM_DRAWS // NUM_SEEDS):
        rows = [SamplingRow(of_kind, position) for of_seed in params for of_kind in of_seed]
        drawn = sample(logits.repeat(len(params), 1), rows).view(len(params), len(KINDS))
        for kind in range(len(KINDS)):
            counts[kind] += torch.bincount(drawn[:, kind], minlength=VOCAB_SIZE)
    return counts


def test_100_000_draws_of_each_kind_fit_the_distribution_of_transformers() -> None:
    logits = torch.randn(len(KINDS), VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 2
    counts = draw_counts(logits)
    for of_kind, kind, row in zip(counts, KINDS, logits, strict=True):
        expected = expected_probabilities(row, kind) * NUM_DRAWS
        assert of_kind.sum() == NUM_DRAWS
        assert of_kind[expected == 0].sum() == 0, f"{kind}: a token outside the filter was drawn"
        assert (expected > 0).sum() > 5, f"{kind}: too few tokens are left for a test"
        likely = expected >= 5  # chi-square needs this many expected draws
        assert p_value(of_kind[likely], expected[likely]) > MIN_P, kind


def test_chi_square_approximation_agrees_with_tables() -> None:
    """The 95th percentile of chi-square with 10 degrees of freedom is 18.307; with 30, the 99.9th is 59.703."""
    for degrees, chi_square, p in ((10, 18.307, 0.05), (30, 59.703, 0.001)):
        expected = torch.full((degrees + 1,), 1e6, dtype=torch.float64)
        counts = expected.clone()
        counts[0] += (chi_square * 1e6) ** 0.5
        assert abs(p_value(counts, expected) - p) < 0.05 * p
