"""The products of adapters are those of plain matrices in float64, whatever rows a step has."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.csrc.build import c_library
from workers.lora.adapter_files import LowRank
from workers.lora.lora_linear import CLoraLinear, LoraLinear, TorchLoraLinear
from workers.lora.lora_pool import LoraPool
from workers.lora.lora_step import NO_ADAPTER

MAX_RANK = 40  # no multiple of what C computes with
RANKS = ((1, 16), (17, 0), (40, 40), (5, 32))  # of each place, for the two layers; 0: the adapter does not change it
SIZES = (80, 16)
# Rows of each place: up to two, vectors; then tiles, where the processor has them; above 16, several runs.
ROWS = ((1, 0, 0, 0), (2, 1, 3, 0), (4, 4, 4, 4), (8, 9, 16, 17), (0, 40, 0, 5))


def make_linear(
    dtype: torch.dtype, num_inputs: int, in_c: bool
) -> tuple[LoraPool, LoraLinear, list[dict[str, LowRank]]]:
    pool = LoraPool(len(RANKS), MAX_RANK, dtype, torch.device("cpu"))
    if not in_c:
        pool.library = None
    linear = pool.make_linear(["first", "second"], num_inputs, SIZES)
    generator = torch.Generator().manual_seed(num_inputs)
    written: list[dict[str, LowRank]] = []

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    for place, ranks in enumerate(RANKS):
        matrices = {
            name: LowRank(random(rank, num_inputs), random(size, rank))
            for name, size, rank in zip(("first", "second"), SIZES, ranks, strict=True)
            if rank
        }
        linear.write(place, {name: LowRank(each.a * 2, each.b) for name, each in matrices.items()})  # overwritten
        linear.write(place, matrices)
        written.append(matrices)
    return pool, linear, written


@pytest.mark.parametrize("num_inputs", [48, 64, 1088])
@pytest.mark.parametrize("counts", ROWS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("in_c", [True, False])
def test_each_row_gets_the_product_of_its_own_adapter(
    in_c: bool, dtype: torch.dtype, tolerance: float, counts: tuple[int, ...], num_inputs: int
) -> None:
    if in_c and c_library(str(dtype).removeprefix("torch.")) is None:
        pytest.skip("there is no C compiler")
    pool, linear, adapters = make_linear(dtype, num_inputs, in_c)
    assert isinstance(linear, CLoraLinear if in_c else TorchLoraLinear)
    places = np.repeat(np.arange(-1, len(counts)), (3, *counts)).astype(np.int64)
    np.random.default_rng(0).shuffle(places)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(places), num_inputs, generator=generator).to(dtype)
    before = torch.randn(len(places), sum(SIZES), generator=generator).to(dtype)
    with pool.serving(places):
        found = linear.add(x, before.clone())
    expected = before.double()
    for row, place in enumerate(places.tolist()):
        for first, size, name in zip((0, SIZES[0]), SIZES, ("first", "second"), strict=True):
            if place != NO_ADAPTER and name in adapters[place]:
                given = adapters[place][name]
                hidden = given.a.double() @ x[row].double()
                expected[row, first : first + size] += given.b.double() @ hidden
    assert torch.equal(found[places == NO_ADAPTER], before[places == NO_ADAPTER])
    distance = (found.double() - expected).abs().max() / expected.abs().max()
    assert distance < tolerance


@pytest.mark.skipif(c_library("float32") is None, reason="there is no C compiler")
def test_three_threads_compute_what_one_does() -> None:
    """Tests have one thread, so this one is a process of its own. Its steps are large enough to be divided."""
    code = """
import torch
from tests.workers.lora import test_lora_linear as tests
torch.set_num_threads(3)  # OMP_NUM_THREADS is not enough: torch starts no more threads than there are cores
assert tests.c_library("float32").omp_get_max_threads() == 3
for counts in tests.ROWS:
    tests.test_each_row_gets_the_product_of_its_own_adapter(True, torch.float32, 1e-5, counts, 1088)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_an_output_that_is_not_contiguous_is_added_to_in_place() -> None:
    pool, linear, adapters = make_linear(torch.float32, 64, in_c=True)
    wide = torch.zeros(2, 2 * sum(SIZES))
    x, output = torch.randn(2, 64), wide[:, : sum(SIZES)]
    with pool.serving(np.array([0, NO_ADAPTER])):
        assert linear.add(x, output) is output
    given = adapters[0]["first"]
    torch.testing.assert_close(wide[0, : SIZES[0]], given.b @ (given.a @ x[0]))
    assert not wide[:, sum(SIZES) :].any()
