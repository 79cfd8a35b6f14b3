"""The team of threads gets smaller while one of them is late, and grows again."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path

import pytest
import torch

from workers.csrc.build import FOLDER, find_compiler

# One region: its last thread is late by so many microseconds. Returns how many threads it had.
REGION = """
#include <unistd.h>
#include "team.c"

int run_region(int late_us) {
    int num_threads = 0;
    const int64_t began_ns = begin_region();
#pragma omp parallel
    {
#pragma omp single
        num_threads = omp_get_num_threads();
        if (omp_get_thread_num() && omp_get_thread_num() == num_threads - 1) usleep(late_us);
        end_work();
    }
    end_region(began_ns);
    return num_threads;
}

int begin_with(int num_threads) {
    omp_set_num_threads(num_threads);
    return run_region(0);
}
"""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("team")
    source, library = folder / "region.c", folder / "region.so"
    source.write_text(REGION)
    command = [compiler, "-std=gnu11", "-fopenmp", "-fPIC", "-shared", f"-I{FOLDER}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    assert torch.get_num_threads()  # torch brings the OpenMP library
    return ctypes.CDLL(str(Path(library)))


def regions_until(team: ctypes.CDLL, num_threads: int, late_us: int) -> int:
    """Run regions until they have so many threads; return how many there were."""
    limit_s, number = time.monotonic() + 60, 0
    while team.run_region(late_us) != num_threads:
        assert time.monotonic() < limit_s, f"no region had {num_threads} threads"
        number += 1
    return number


def test_a_thread_that_is_late_leaves_the_team_and_comes_back(team: ctypes.CDLL) -> None:
    before = torch.get_num_threads()
    try:
        assert team.begin_with(3) == 3
        assert regions_until(team, 2, 1000) >= 1, "one region is no reason"
        regions_until(team, 1, 1000)
        regions_until(team, 3, 0)
        assert team.begin_with(2) == 2, "a number that others set counts at once"
    finally:
        torch.set_num_threads(before)


def test_a_team_of_one_stays(team: ctypes.CDLL) -> None:
    before = torch.get_num_threads()
    try:
        assert team.begin_with(1) == 1
        assert {team.run_region(1000) for _ in range(100)} == {1}
    finally:
        torch.set_num_threads(before)
