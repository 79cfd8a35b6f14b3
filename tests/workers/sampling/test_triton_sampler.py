"""The Triton sampler chooses the tokens that the CPU's sampler chooses."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from servekit.protocol.sampling_params import SamplingParams
from tests.support.triton_device import DEVICE, NAN, random, triton, triton_sampler
from workers import batch
from workers.batch import SamplingRow
from workers.sampling import sampler
from workers.sampling.sampler import uniform

MIN_TEMPERATURE, TILE_SIZE = triton_sampler.MIN_TEMPERATURE, triton_sampler.TILE_SIZE
TritonError = triton.TritonError
Filters, sample = triton_sampler.Filters, triton_sampler.sample

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


def on_device(values: list[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_the_temperature_below_which_sampling_is_greedy_is_the_cpu_samplers() -> None:
    assert MIN_TEMPERATURE == batch.MIN_TEMPERATURE


def test_greedy_takes_the_first_of_equal_largest_logits() -> None:
    logits = random(5, 2 * TILE_SIZE + 100)
    logits[1, [70, TILE_SIZE, TILE_SIZE + 1]] = 9.0
    logits[2, [TILE_SIZE + 5, 2 * TILE_SIZE + 5]] = 9.0
    logits[3, :] = -float("inf")
    logits[4, :] = -5.0
    token_ids = sample(logits, torch.zeros(5, device=DEVICE), torch.full_like(logits[:, 0], 0.9).double())
    assert token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert token_ids.tolist()[1:] == [70, TILE_SIZE + 5, 0, 0]


def distribution(logits: Tensor, row: SamplingRow) -> tuple[Tensor, Tensor]:
    """Return the distribution that the CPU's sampler inverts: tokens in order, and probabilities in float64."""
    _, probabilities, _ = sampler._probabilities(logits[None].cpu(), [row], [0])
    order = torch.arange(len(logits))
    if row.is_filtered:
        probabilities, ranks = probabilities.sort(dim=-1, descending=True, stable=True)
        probabilities, order = sampler._keep_top(probabilities, [row.sampling]), ranks[0]
    return order, probabilities[0] / probabilities.sum()


def assert_inverts(token_id: int, number: float, logits: Tensor, row: SamplingRow) -> None:
    """Check that the token is the one of this number, or of a number within the error of sums in float32."""
    order, probabilities = distribution(logits, row)
    rank = int((order == token_id).nonzero())
    assert probabilities[rank] > 0, f"{token_id} is not among the tokens that the filters keep"
    end = float(probabilities[: rank + 1].sum())
    begin = end - float(probabilities[rank])
    assert begin - 1e-6 <= number <= end + 1e-6, (begin, number, end)


def sampled(logits: Tensor, rows: list[SamplingRow], numbers: list[float]) -> list[int]:
    params = [row.sampling for row in rows]
    filters = Filters(
        on_device([each.top_k for each in params], torch.int32),
        on_device([each.top_p for each in params], torch.float32),
        on_device([each.min_p for each in params], torch.float32),
    )
    temperatures = on_device([each.temperature for each in params], torch.float32)
    has_filters = any(row.is_filtered for row in rows)
    token_ids = sample(logits, temperatures, on_device(numbers, torch.float64), filters if has_filters else None)
    return [int(each) for each in token_ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
def test_temperature_inverts_the_distribution(dtype: torch.dtype, temperature: float) -> None:
    numbers = [0.0, 1.0 - 2**-53, 0.5, *(uniform(3, position) for position in range(13))]
    logits = (3 * random(1, 2 * TILE_SIZE + 100)).to(dtype).expand(len(numbers), -1).contiguous()
    logits[:, ::3] = -float("inf")  # as a grammar excludes tokens
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=temperature), 0)
    for token_id, number in zip(sampled(logits, [row] * len(numbers), numbers), numbers, strict=True):
        assert_inverts(token_id, number, logits[0].float(), row)
        assert token_id % 3


def test_with_a_temperature_each_token_is_chosen_between_its_boundaries() -> None:
    logits, row = random(1, 30), SamplingRow(SamplingParams(max_tokens=1, temperature=0.8), 0)
    ends = distribution(logits[0], row)[1].cumsum(0)
    numbers = [float(end) + shift for end in ends[:-1] for shift in (-3e-6, 3e-6)]
    expected = [rank + shift for rank in range(29) for shift in (0, 1)]
    assert sampled(logits.expand(len(numbers), -1).contiguous(), [row] * len(numbers), numbers) == expected


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_number_on_a_boundary_chooses_the_next_token(top_k: int) -> None:
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.5, top_k=top_k), 0)
    assert sampled(torch.zeros(4, 4, device=DEVICE), [row] * 4, [0.0, 0.25, 0.5, 0.75]) == [0, 1, 2, 3]


FILTERS: list[dict[str, float]] = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 40}, {"top_k": 100_000}, {"top_p": 0.0}, {"top_p": 0.1}, {"top_p": 0.9},
    {"top_p": 0.9999}, {"min_p": 0.001}, {"min_p": 0.3}, {"min_p": 1.0}, {"top_k": 30, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02}, {"top_p": 0.7, "min_p": 0.001}, {"temperature": 0.0}, {},
]  # fmt: skip


@pytest.mark.parametrize("spacing", [0.0, 0.5], ids=["distinct", "ties"])
def test_top_k_top_p_and_min_p_keep_what_the_cpu_keeps(spacing: float) -> None:
    chosen = [{"max_tokens": 1, "temperature": (0.7, 2.0)[i % 2], **each} for i, each in enumerate(FILTERS)]
    numbers = [uniform(5, i) for i in range(len(chosen))]
    for last in FILTERS[11:13]:
        chosen += [{"max_tokens": 1, **last}] * 2
        numbers += [0.0, 1 - 2**-53]
    rows = [SamplingRow(SamplingParams(**each), 0) for each in chosen]
    logits = 3 * random(len(rows), TILE_SIZE + 500)
    logits[:, ::5] = -float("inf")
    if spacing:
        logits = (logits / spacing).round() * spacing  # -0 among them
    for row, row_logits, number, token_id in zip(rows, logits, numbers, sampled(logits, rows, numbers), strict=True):
        if row.is_greedy:
            assert token_id == int(row_logits.argmax())
        else:
            assert_inverts(token_id, number, row_logits, row)


@pytest.mark.parametrize("kept_size", [16, 1024])
@pytest.mark.parametrize(
    "options", [{"top_k": 30}, {"top_k": 900}, {"top_p": 0.95}, {"top_p": 0.999999}, {"min_p": 1e-9}], ids=str
)
def test_filters_keep_the_same_among_the_probable_logits_and_among_all(
    options: dict[str, float], kept_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 of each tile, there is always one with more. With 1,024, some of the filters keep improbable tokens."""
    monkeypatch.setattr(triton_sampler, "KEPT_SIZE", kept_size)
    logits = (3 * random(1, 2 * TILE_SIZE)).expand(12, -1).contiguous()
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.6, **options), 0)
    numbers = [0.0, 1 - 2**-53, *(uniform(9, position) for position in range(10))]
    for token_id, number in zip(sampled(logits, [row] * 12, numbers), numbers, strict=True):
        assert_inverts(token_id, number, logits[0], row)


def test_top_k_finds_its_threshold_among_logits_of_all_magnitudes() -> None:
    magnitudes = 10.0 ** (60 * torch.rand(300, device=DEVICE) - 30)
    logits = (magnitudes * torch.randn(300, device=DEVICE).sign()).expand(4, -1).contiguous()
    order, top_k = logits[0].argsort(descending=True).tolist(), (1, 9, 150, 260)
    # At this temperature all tokens are equally probable, so the number says which of the kept ones is chosen.
    rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=1e33, top_k=each), 0) for each in top_k]
    assert sampled(logits, rows, [1 - 0.5 / each for each in top_k]) == [order[each - 1] for each in top_k]


def test_filters_break_ties_by_token_id() -> None:
    """With halves and quarters, a sum ends exactly at the boundary, and one more token would be one too many."""
    logits = torch.tensor([0.25, 0.25, 0.5], device=DEVICE).log().expand(6, -1).contiguous()
    rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_p=0.75), 0)] * 3
    rows += [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_k=2), 0)] * 2
    rows += [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5), 0)]
    assert sampled(logits, rows, [0.1, 0.7, 0.99, 0.1, 0.99, 0.99]) == [2, 0, 0, 2, 0, 2]


def test_rows_without_a_possible_token_still_give_a_token() -> None:
    logits = torch.full((4, 50), -float("inf"), device=DEVICE)
    logits[1], logits[2, 3], logits[3, 4:] = NAN, float("inf"), torch.finfo(torch.float32).min
    for top_p in (1.0, 0.5):
        rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_p=top_p), 0)] * 4
        assert all(0 <= token_id < 50 for token_id in sampled(logits, rows, [0.5] * 4))


def test_rows_with_different_filters_are_sampled_as_on_the_cpu() -> None:
    logits = 3 * random(6, 300)
    options = [{"temperature": 0.0}, {}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}]
    for seed in range(2):
        rows = [
            SamplingRow(SamplingParams(max_tokens=1, **{"temperature": 0.8, "seed": seed, **each}), position)
            for position, each in enumerate(options)
        ]
        assert torch.equal(sampler._sample_on_gpu(logits, rows), sampler.sample(logits, rows))


def test_the_check_at_load_finds_that_tokens_agree_and_says_where_they_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler, "triton_failure", lambda: None)
    monkeypatch.setitem(sys.modules, "workers.sampling.triton_sampler", triton_sampler)
    assert sampler._triton_failure(301, DEVICE) is None and not caplog.records
    right = triton_sampler.sample
    monkeypatch.setattr(triton_sampler, "sample", lambda logits, *args: right(logits, *args).add(1))
    failure = sampler._triton_failure(302, DEVICE)
    assert failure == "21 of 21 tokens are not those that torch's operations choose"
    assert "sampling is slow" in caplog.text

    def fail(*_: object) -> Tensor:
        raise TritonError("out of resource: shared memory")

    monkeypatch.setattr(triton_sampler, "sample", fail)
    assert sampler._triton_failure(303, DEVICE) == "TritonError: out of resource: shared memory"
    monkeypatch.setattr(sampler, "triton_failure", lambda: "no C compiler")
    assert sampler._triton_failure(304, DEVICE) == "no C compiler"


def test_the_check_at_load_lets_one_number_at_a_boundary_choose_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "triton_failure", lambda: None)
    monkeypatch.setitem(sys.modules, "workers.sampling.triton_sampler", triton_sampler)
    right, seeds = triton_sampler.sample, [0]

    def shifted(logits: Tensor, temperatures: Tensor, numbers: Tensor, filters: Any) -> Tensor:
        """Return other tokens for rows of these seeds without filters."""
        is_shifted = torch.isin(numbers, on_device([uniform(seed, 0) for seed in seeds], torch.float64))
        if filters is not None:
            is_shifted &= (filters.top_k == 0) & (filters.top_p == 1.0) & (filters.min_p == 0.0)
        return right(logits, temperatures, numbers, filters) + is_shifted

    monkeypatch.setattr(triton_sampler, "sample", shifted)
    assert sampler._triton_failure(305, DEVICE) is None
    seeds.append(1)
    failure = sampler._triton_failure(306, DEVICE)
    assert failure == "2 of 21 tokens are not those that torch's operations choose"
