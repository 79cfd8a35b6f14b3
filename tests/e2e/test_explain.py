"""Claims about explanations of a live server under faults; `make bench-explain ARGS=live` prints the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.explain import TOLERANCE_S, run_live
from servekit.requests.time_causes import TimeCause

MODEL = "sim:step=2ms,decode=50us,prefill=5us"


@pytest.mark.long
def test_the_causes_of_a_thousand_requests_sum_to_their_wall_times(tmp_path: Path) -> None:
    """With preemptions, killed workers, clients that do not read, and clients that leave."""
    run = run_live(MODEL, 1000, tmp_path)
    assert run.num_explained == 1000 and not run.gaps
    assert run.worst_sum_s <= TOLERANCE_S
    assert run.log_errors_s[500] <= TOLERANCE_S, "half of the wall times are those of another layer, within 1 ms"
    assert run.num_preemptions and run.num_restarts == 2
    assert run.outcomes["aborted"] == 200 and run.outcomes["read slowly"] > 100
    seen = {TimeCause(cause) for cause in run.causes_s}
    assert run.causes_s[TimeCause.CLIENT_NOT_READING] > 1.0
    assert {
        TimeCause.PREEMPTED,
        TimeCause.RECOMPUTE,
        TimeCause.WORKER_LOSS,
        TimeCause.SLOTS,
        TimeCause.MEMORY,
        TimeCause.SHARED_PROMPT,
    } <= seen
