"""Processes that compute together, forked from one that has imported what they need.

To import torch, transformers and the tests takes most of the time of a rank of a small model. So one process, the fork
server of Python's multiprocessing, imports them for all tests of a test process, and computes nothing: it has none of
torch's threads, which would not go on in a fork.

Forks have the same seed for the hashes of strings, so sets of strings have the same order in all of them. The ranks of
a server have not: test_ranks_make_the_same_plans_with_sets_in_different_orders starts separate processes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from torch.multiprocessing import start_processes

# Imported by the fork server; whatever a function needs besides is imported by each rank.
PRELOADED = "tests.support.rank_imports"


def run_ranks(function: Callable[..., None], num_ranks: int, *arguments: Any, timeout_s: float) -> None:
    """Run `function(rank, *arguments)` in a process for each rank, at the same time.

    Raises the error of a rank that fails, and TimeoutError. Whatever happens, no rank is left: one that waits for
    another one which has failed may wait forever.
    """
    multiprocessing.set_forkserver_preload([PRELOADED])
    deadline_s = time.monotonic() + timeout_s
    ranks = start_processes(function, arguments, num_ranks, join=False, daemon=True, start_method="forkserver")
    try:
        while not ranks.join(max(0.0, deadline_s - time.monotonic())):  # returns when one of them has ended
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the ranks did not end within {timeout_s:g} s")
    finally:
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join()
