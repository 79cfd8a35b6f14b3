"""The team of threads gets smaller while one of them is late, and grows again. The clock is the test's."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from workers.csrc.build import FOLDER, find_compiler

# A region in which the last thread ends its work later than the others. Returns how many threads it has.
REGION = """
#include <stdint.h>
#include <time.h>

static int64_t clock_ns = 1000000000;

static int read_clock(clockid_t clock, struct timespec *time) {
    (void)clock;
    time->tv_sec = clock_ns / 1000000000;
    time->tv_nsec = clock_ns % 1000000000;
    return 0;
}

#define clock_gettime read_clock
#include "team.c"

int run_region(int work_us, int late_us) {
    const int64_t began_ns = begin_region();
    const int size = omp_get_max_threads();
    clock_ns += 1000 * (int64_t)work_us;
    for (int thread = 0; thread < size; thread++) work_ends[thread].ns = clock_ns;
    if (size > 1) clock_ns += 1000 * (int64_t)late_us;
    work_ends[size - 1].ns = clock_ns;
    end_region(began_ns);
    return size;
}
"""
WORK_US = 100


class Team:
    """A team of its own, and the time that passes in its regions."""

    def __init__(self, library: Path) -> None:
        code = ctypes.CDLL(str(library))
        self._run, self.use_all_threads = code.run_region, code.use_all_threads
        self.pause, self.resume = code.pause_team, code.resume_team

    def sizes(self, num_regions: int, late_us: int) -> list[int]:
        """Run regions; return how many threads each one had."""
        return [self._run(WORK_US, late_us) for _ in range(num_regions)]


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler")
    before = torch.get_num_threads()  # torch brings the OpenMP library
    source, library = tmp_path / "region.c", tmp_path / "region.so"
    source.write_text(REGION)
    command = [compiler, "-std=gnu11", "-fopenmp", "-fPIC", "-shared", f"-I{FOLDER}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    yield Team(library)
    torch.set_num_threads(before)


def test_a_thread_that_is_late_leaves_the_team_and_comes_back(team: Team) -> None:
    torch.set_num_threads(3)
    assert set(team.sizes(1000, late_us=40)) == {3}, "less than 40 % of the time is lost"
    late = team.sizes(100, late_us=1000)
    assert late[:15] == [3] * 15 and late[-1] == 1, "after 20 ms of such regions, one is fewer"
    assert late == sorted(late, reverse=True)
    back = team.sizes(5000, late_us=0)
    assert back[:300] == [1] * 300 and back[-1] == 3, "one more is tried after a pause"
    assert back == sorted(back)


def test_more_threads_are_tried_less_often_while_they_are_late(team: Team) -> None:
    torch.set_num_threads(2)
    team.sizes(30, late_us=1000)
    first, later = (team.sizes(30_000, late_us=1000).count(2) for _ in range(2))
    assert later < first < 300, "of 30,000 regions in each three seconds"
    assert 2 in team.sizes(20_000, late_us=1000), "it is tried again, at least every 1.6 s"


def test_the_number_that_others_set_counts_at_once(team: Team) -> None:
    torch.set_num_threads(3)
    team.sizes(25, late_us=1000)
    torch.set_num_threads(4)
    assert team.sizes(1, late_us=0) == [4]
    torch.set_num_threads(1)
    assert set(team.sizes(50_000, late_us=0)) == {1}


def test_work_without_regions_has_all_threads_and_the_team_stays_small(team: Team) -> None:
    torch.set_num_threads(3)
    assert team.sizes(100, late_us=1000)[-1] == 1
    team.use_all_threads()
    assert torch.get_num_threads() == 3
    assert team.sizes(1, late_us=1000) == [1] and torch.get_num_threads() == 1
    team.use_all_threads()
    torch.set_num_threads(2)  # others set another number meanwhile
    assert team.sizes(1, late_us=0) == [2]


def test_while_it_is_paused_one_thread_computes_and_nothing_is_learned(team: Team) -> None:
    torch.set_num_threads(3)
    assert team.sizes(1, late_us=0) == [3]
    for _ in range(100):
        team.pause()
        assert team.sizes(1, late_us=1000) == [1]
        team.resume()
    assert team.sizes(1, late_us=0) == [3] and torch.get_num_threads() == 3
    assert 1 in team.sizes(100, late_us=1000), "it goes on to learn"
