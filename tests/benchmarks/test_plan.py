"""Claims about how the benchmark of `servekit plan` calibrates."""

from __future__ import annotations

import pytest

from benchmarks.plan import admissions_when_idle_s
from servekit.laboratory.timeline import RequestTimeline, Timeline


def test_only_requests_that_came_when_all_before_them_had_ended_show_how_long_an_admission_takes() -> None:
    timeline = Timeline()
    # Arrival, admission and end. The first two come together, and the fourth and the fifth while the third one runs.
    lives = [(0, 0.9, 5), (0, 0.8, 3), (6, 6.1, 9), (7, 7.7, 8), (8.5, 8.6, 8.9), (9.5, 9.7, 10)]
    for number, times_s in enumerate(lives):
        arrival_s, admitted_s, ended_s = times_s
        timeline.requests[number] = RequestTimeline(
            sequence_id=number, arrival_s=arrival_s, num_prompt_tokens=1, admitted_s=admitted_s, ended_s=ended_s
        )
    assert admissions_when_idle_s(timeline) == pytest.approx([0.1, 0.2])
