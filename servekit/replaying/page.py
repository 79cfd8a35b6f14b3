"""Write a recorded and a simulated run as one HTML page that needs no server and no other file."""

from __future__ import annotations

from bisect import bisect_right

from servekit.laboratory.page import fill_template
from servekit.replaying.report import Comparison, headline, rows, step_times_text
from servekit.replaying.run_record import RunRecord

NUM_POINTS = 480  # of a line
CHARTS = ("requests that wait", "requests that run", "KV blocks in use", "tokens/s")


def as_page(comparison: Comparison, happened: RunRecord, replayed: RunRecord) -> str:
    """Write a page with a table, and a chart for each of CHARTS with a line for each run."""
    began_s = min(happened.began_s, replayed.began_s)
    ends_s = [run.samples[-1].at_s for run in (happened, replayed) if run.samples]
    duration_s = max(ends_s, default=began_s) - began_s
    lines = [_lines(run, began_s, duration_s) for run in (happened, replayed)]
    data: dict[str, object] = {
        "title": headline(comparison),
        "note": step_times_text(comparison),
        "duration_s": duration_s,
        "charts": [
            {"name": name, "is_share": name == "KV blocks in use", "happened": one, "replayed": other}
            for name, one, other in zip(CHARTS, *lines, strict=True)
        ],
        "rows": rows(comparison),
    }
    return fill_template(__package__, "page.html", data)


def _lines(run: RunRecord, began_s: float, duration_s: float) -> tuple[list[float], ...]:
    """The values of each chart at NUM_POINTS times: the state at that time, and the rate of tokens since the last."""
    times_s = [sample.at_s for sample in run.samples]
    interval_s = duration_s / NUM_POINTS
    waiting: list[float] = []
    running: list[float] = []
    blocks: list[float] = []
    rate: list[float] = []
    num_before = 0
    for number in range(1, NUM_POINTS + 1):
        index = bisect_right(times_s, began_s + number * interval_s) - 1
        if index < 0:
            values = (0, 0, 0.0, 0)
        else:
            sample = run.samples[index]
            values = (sample.num_waiting, sample.num_running, round(sample.kv_share, 4), sample.num_tokens)
        waiting.append(values[0])
        running.append(values[1])
        blocks.append(values[2])
        rate.append(round((values[3] - num_before) / interval_s, 1) if interval_s else 0.0)
        num_before = values[3]
    return waiting, running, blocks, rate
