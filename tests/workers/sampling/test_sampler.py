"""Claims about sampling, against transformers' logits processors and counted draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from servekit.protocol.messages import SlotAssignment
from servekit.protocol.sampling_params import SamplingParams
from workers.batch import SamplingRow, SlotTable
from workers.sampling.penalties import adjust
from workers.sampling.sampler import _uniforms_of, sample, uniform


def row(position: int = 0, **changes: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=1, **changes), position)


def logits_of(num_rows: int, vocab_size: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def test_uniform_numbers_are_uniform_and_never_one() -> None:
    seeds, positions = list(range(100)), list(range(1000))
    numbers = torch.from_numpy(_uniforms_of([seed for seed in seeds for _ in positions], positions * len(seeds)))
    counts = torch.histc(numbers, bins=100, min=0.0, max=1.0)
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 160, "99 degrees of freedom; 160 has p < 1e-4"
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert uniform(-1, 3) == uniform(2**64 - 1, 3) != uniform(0, 3)


def splitmix(state: int) -> int:
    """A round of SplitMix64 without its lowest eleven bits, in Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return (state ^ (state >> 31)) // 2**11 * 2**11


@pytest.mark.parametrize("seed", [0, 7, -3, 2**63 - 1])
def test_numbers_that_are_computed_together_are_those_of_each_alone(seed: int) -> None:
    """Answers to a seed stay the same from version to version."""
    positions = [0, 1, 31, 2**20]
    expected = [splitmix(splitmix(seed % 2**64) ^ position) / 2**64 for position in positions]
    assert _uniforms_of([seed] * 4, positions).tolist() == expected == [uniform(seed, each) for each in positions]


def test_temperature_zero_is_greedy() -> None:
    logits = logits_of(5)
    assert sample(logits, [row(temperature=0.0)] * 5).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, [row(temperature=1e-30, top_p=0.5)] * 5).tolist() == logits.argmax(-1).tolist()


def test_sampling_of_a_row_does_not_depend_on_its_batch() -> None:
    logits = logits_of(9)
    rows = [
        row(seed=1, position=9),
        row(temperature=0.0),
        row(top_k=5, seed=2, position=3),
        row(top_p=0.7, seed=3, position=4),
        row(temperature=0.3, top_k=7, top_p=0.9, seed=4, position=5),
        row(temperature=2.0, seed=5, position=6),
        row(min_p=0.2, seed=6, position=7),
        row(typical_p=0.4, seed=7, position=8),
        row(typical_p=0.9, top_k=20, top_p=0.95, min_p=0.05, seed=8, position=9),
    ]
    together = sample(logits, rows).tolist()
    alone = [sample(logits[i : i + 1], [rows[i]]).item() for i in range(9)]
    backwards = sample(logits.flip(0), rows[::-1]).flip(0).tolist()
    assert together == alone == backwards


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 8])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_draws_follow_the_distribution_of_transformers_processors(temperature: float, top_k: int, top_p: float) -> None:
    check_draws(temperature=temperature, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("min_p", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("others", [{}, {"temperature": 1.7, "top_k": 8}, {"top_p": 0.9}])
def test_min_p_draws_as_transformers_does(min_p: float, others: dict[str, float]) -> None:
    check_draws(min_p=min_p, **others)


@pytest.mark.parametrize("typical_p", [0.2, 0.6, 0.95])
@pytest.mark.parametrize(
    "others", [{}, {"temperature": 0.5}, {"temperature": 1.7, "top_k": 8}, {"top_p": 0.9, "min_p": 0.02}]
)
def test_typical_p_draws_as_transformers_does(typical_p: float, others: dict[str, float]) -> None:
    check_draws(typical_p=typical_p, **others)


def check_draws(
    *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, typical_p: float = 1.0
) -> None:
    """Count draws against the distribution that transformers' processors leave, in transformers' order."""
    num_draws = 20_000
    logits = logits_of(1, vocab_size=30, seed=3)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p))
    if typical_p < 1.0:
        processors.append(TypicalLogitsWarper(typical_p))
    expected = torch.softmax(processors(torch.zeros(1, 1, dtype=torch.int64), logits.clone())[0].double(), -1)
    params = SamplingParams(
        max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, seed=11
    )
    rows = [SamplingRow(params, position) for position in range(num_draws)]
    counts = torch.bincount(sample(logits.expand(num_draws, -1), rows), minlength=30).double()
    allowed = expected > 0
    assert counts[~allowed].sum() == 0, "a token outside the filter was drawn"
    likely = expected * num_draws >= 5
    chi_square = ((counts - expected * num_draws) ** 2 / (expected * num_draws))[likely].sum().item()
    degrees = max(int(likely.sum()) - 1, 1)
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 8, "five standard deviations"


def test_top_p_keeps_the_most_probable_token_however_small_it_is() -> None:
    logits = logits_of(1)
    assert sample(logits, [row(top_p=1e-9)]).item() == logits.argmax().item()


def test_penalties_follow_their_definitions_and_change_no_other_row() -> None:
    """Prompt 3 3 4, output 4 5 5; repetition counts both, presence and frequency the output."""
    table = SlotTable(num_slots=2, max_model_len=9, num_blocks=4, block_size=4, device=torch.device("cpu"))
    table.assign(SlotAssignment(1, SamplingParams(max_tokens=9), prompt_length=3))
    table.write([(1, 0, (3, 3, 4, 4, 5, 5))])
    table.token_ids[1 * table.row_length + 6 :] = 7  # what stands behind the known tokens counts for nothing
    params = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    bent = SamplingRow(SamplingParams(max_tokens=9, **params), position=6, slot=1, num_outputs=3)
    logits = logits_of(2, vocab_size=10)
    adjusted = adjust(logits, [row(), bent], table)
    assert torch.equal(adjusted[0], logits[0])
    expected = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[3, 3, 4, 4, 5, 5]]), logits[1:].clone())[0]
    expected[4] -= 0.5 + 0.25
    expected[5] -= 0.5 + 2 * 0.25
    assert torch.allclose(adjusted[1], expected)
    assert adjust(logits, [row(), row()], table) is logits
