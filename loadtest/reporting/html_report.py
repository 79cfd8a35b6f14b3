"""The HTML page of one run or several: report.html, one file without scripts or external files.

It is built of elements and serialized as XML that is also HTML, so nothing that a server or a user wrote becomes
markup.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

import msgspec
import numpy as np
from msgspec import Struct

from loadtest.analysis.measurements import Measurements
from loadtest.analysis.server_metrics import Scrape, server_series
from loadtest.analysis.statistics import Distribution, Floats
from loadtest.analysis.summary import Figures, Summary
from loadtest.analysis.timeline import Timeline, timeline
from loadtest.reporting.charts import Axis, Series, chart, cumulative, element
from loadtest.reporting.formatting import (
    NOTHING,
    PERCENTILES,
    as_number,
    as_time,
    distinct,
    failure_label,
    frequent_failures,
    headline,
    outcome_label,
    percentile_rows,
)

MAX_POINTS = 1000  # of a cloud, in a page of one run
MAX_BINS, MIN_BINS = 60, 20  # of a line over time: in finer bins noise hides a trend
BIN_S = 1.0  # within those bounds
MAX_ERRORS = 5  # error kinds that have a colour of their own
FAILED = 5  # the colour of failures
NOT_VALID = "NO"
BAD = ("MISSED", "WRONG", NOT_VALID)  # endings of table cells that are highlighted
LOAD = re.compile(r"[a-z]+:([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?:,|$)")  # a rate, or a number of clients
MAY_BE_EMPTY = {"meta", "circle", "g", "line", "path", "rect"}  # void elements, or SVG

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2128; --faint: #667080; --grid: #e4e7eb; --tile: #f5f6f8;
  --bad: #b3261e; --c0: #0072b2; --c1: #d98200; --c2: #00876a; --c3: #b0568c; --c4: #3f97c9; --c5: #c62f25; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e3e6ea; --faint: #98a1ad; --grid: #2a3038;
  --tile: #1d2228; --bad: #ff8a80; --c0: #4aa8e0; --c1: #f0a93c; --c2: #35c29d; --c3: #d989b8; --c4: #8fcdf0;
  --c5: #ff7b70; } }
body { margin: 0 auto; max-width: 1500px; padding: 1rem 1.5rem; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } summary { cursor: pointer; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 8px; }
.tile { background: var(--tile); border-radius: 6px; padding: 8px 12px; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 1.1rem; } .tile span { color: var(--faint); font-size: 0.8rem; }
.bad { color: var(--bad); } .warning { border-left: 4px solid var(--bad); padding: 4px 12px; margin: 8px 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); gap: 12px 20px; }
.small { grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 3px 10px; border-bottom: 1px solid var(--grid); text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
.columns td, .columns th { white-space: normal; } details { margin-top: 8px; }
pre { background: var(--tile); border-radius: 6px; padding: 8px 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
.chart { width: 100%; height: auto; } .chart text { font: 11px system-ui, sans-serif; fill: var(--text); }
.chart .heading { font-weight: 600; } .chart .tick { fill: var(--faint); }
.chart .end { text-anchor: end; } .chart .middle { text-anchor: middle; }
.grid { stroke: var(--grid); } .axis { stroke: var(--faint); }
.line { fill: none; stroke-width: 1.5; stroke-linejoin: round; stroke-linecap: round; }
.dashed { stroke-dasharray: 4 3; } .points { opacity: 0.55; } .touch { opacity: 0; } .touch:hover { opacity: 1; }
"""
COLOURS = "".join(
    f".line.c{number} {{ stroke: var(--c{number}); }} .points.c{number}, .touch.c{number}, .key.c{number} "
    f"{{ fill: var(--c{number}); }}\n"
    for number in range(6)
)

TIME = Axis("seconds since the beginning", lambda value: f"{value:g} s", low=0.0)
LATENCY = Axis(text=as_time, is_logarithmic=True)
RATE = Axis(text=as_number)
SHARE = Axis(text=lambda value: f"{100.0 * value:g} %", low=0.0, high=1.0)


class Run(Struct, frozen=True):
    """What a page shows of a run."""

    label: str  # `poisson:20`; distinguishes it from the others
    measured: Measurements
    summary: Summary
    scrapes: Sequence[Scrape] = ()


def write(path: Path, runs: Sequence[Run], title: str = "Load test", conclusion: str = "") -> None:
    path.write_text(render(runs, title, conclusion), encoding="utf-8")


def render(runs: Sequence[Run], title: str = "Load test", conclusion: str = "") -> str:
    """Return the page: all of one run, or for several a comparison first and then each run."""
    assert runs
    page = element(None, "html", lang="en")
    head = element(page, "head")
    element(head, "meta", charset="utf-8")
    element(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    element(head, "title", title)
    element(head, "style", STYLE + COLOURS)
    body = element(page, "body")
    element(body, "h1", title)
    if conclusion:
        element(element(body, "p"), "b", conclusion)
    max_points = max(100, MAX_POINTS // len(runs))
    if len(runs) == 1:
        _show_run(body, runs[0], max_points)
    else:
        runs = _by_load(runs)
        _show_sweep(body, runs)
        for run in runs:
            details = element(body, "details")
            element(details, "summary", run.label)
            _show_run(details, run, max_points)
    for each in page.iter():
        # An empty element is written as `<pre />`, which HTML reads as one that is never closed.
        if each.tag not in MAY_BE_EMPTY and not each.text and not len(each):
            each.text = "\u00a0"
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode")


# -- one run ----------------------------------------------------------------------------------------------------------


def _show_run(parent: Element, run: Run, max_points: int) -> None:
    summary = run.summary
    _show_doubts(parent, summary)
    _show_tiles(parent, headline(summary, summary.full))
    end_s = max([run.measured.span_s()[1], *(t_s for t_s, _ in run.scrapes)])
    series = timeline(run.measured, bin_s=_bin_s(end_s))
    axis = msgspec.structs.replace(TIME, high=end_s or 1.0)
    element(parent, "h2", "Latency over time, by intended start")
    _show(parent, _latency_charts(run.measured, axis, max_points))
    element(parent, "h2", "Distributions")
    _show(parent, _distribution_charts(run.measured), "charts small")
    element(parent, "h2", "Load and throughput over time")
    _show(parent, _load_charts(series, axis))
    element(parent, "h2", "The server over time, as it reports")
    _show(parent, _server_charts(run.scrapes, axis))
    element(parent, "h2", "Failures")
    _show_failures(parent, run, axis, series.bin_s)
    element(parent, "h2", "Times")
    _show_times(parent, "The whole run", summary.full, summary.event_loop_lag_s)
    if summary.steady is not None:
        _show_times(parent, "The steady state", summary.steady)
    element(parent, "h2", "How it was run")
    _show_environment(parent, summary)


def _bin_s(end_s: float) -> float:
    """Return a bin length of which the run has a whole number: a partial bin at the end would look like a drop."""
    return max(end_s, 1e-3) / min(MAX_BINS, max(MIN_BINS, int(end_s / BIN_S)))


def _show(parent: Element, charts: Iterable[Element], kind: str = "charts") -> None:
    shown = list(charts)
    if shown:
        element(parent, "div", class_=kind).extend(shown)
    else:
        element(parent, "p", "Nothing was measured.")


def _show_doubts(parent: Element, summary: Summary) -> None:
    if not summary.is_valid:
        box = element(parent, "div", class_="warning")
        element(box, "b", "This run is not valid.", class_="bad")
        for reason in summary.invalid_because:
            element(box, "p", reason)
    for note in summary.notes:
        element(parent, "p", f"Note: {note}.")


def _show_tiles(parent: Element, figures: dict[str, str]) -> None:
    tiles = element(parent, "div", class_="tiles")
    for name, value in figures.items():
        tile = element(tiles, "div", class_="tile")
        element(tile, "b", value, class_="bad" if value.endswith(BAD) else "")
        element(tile, "span", name)


def _latency_charts(measured: Measurements, axis: Axis, max_points: int) -> Iterable[Element]:
    started_s, is_failed = measured.intended_s, measured.is_failed
    failed = [each for each, is_of_it in zip(measured.records, is_failed, strict=True) if is_of_it]
    for name, intended, actual in (
        ("TTFT", measured.ttft_s, measured.ttft_from_start_s),
        ("E2E", measured.e2e_s, measured.e2e_from_start_s),
    ):
        series = [
            Series("from the actual start", started_s, actual, 1, is_points=True),
            Series("from the intended start", started_s, intended, 0, is_points=True),
        ]
        if name == "E2E" and failed:
            x = started_s[is_failed]
            y = measured.ended_s[is_failed] - x
            notes = [outcome_label(each.outcome, each.status, each.error) for each in failed]
            series.append(Series("failed", x, y, FAILED, is_points=True, notes=notes))
        yield chart(name, series, axis, LATENCY, max_points=max_points)


def _distribution_charts(measured: Measurements) -> Iterable[Element]:
    times = msgspec.structs.replace(LATENCY, label="at most this long")
    for name, curves in (
        ("TTFT", {"actual": measured.ttft_from_start_s, "intended": measured.ttft_s}),
        ("ITL", {"pause": measured.pause_s, "ITL": measured.inter_token_s()}),
        ("E2E", {"actual": measured.e2e_from_start_s, "intended": measured.e2e_s}),
    ):
        series = [
            Series(label, *cumulative(values), colour, is_dashed=colour == 1)
            for colour, (label, values) in zip((1, 0), curves.items(), strict=True)
        ]
        yield chart(f"{name}, share of all", series, times, SHARE, width=460.0)


def _load_charts(series: Timeline, axis: Axis) -> Iterable[Element]:
    middles_s = np.array(series.t_s) + series.bin_s / 2.0

    def line(label: str, values: Sequence[float], colour: int) -> Series:
        return Series(label, middles_s, np.array(values, np.float64), colour)

    def per_s(label: str, nums: Sequence[int], colour: int) -> Series:
        return line(label, [num / series.bin_s for num in nums], colour)

    yield chart("output tokens/s", [line("", series.output_tokens_per_s, 0)], axis, RATE)
    yield chart("requests in flight", [line("", series.in_flight, 2)], axis, RATE)
    requests = [per_s("begun", series.num_begun, 1), per_s("answered", series.num_answered, 0)]
    yield chart("requests/s", requests, axis, RATE)


def _server_charts(scrapes: Sequence[Scrape], axis: Axis) -> Iterable[Element]:
    reported = server_series(scrapes)
    batch = [
        Series(label, *reported[name], colour)
        for colour, (label, name) in enumerate((("running", "num_running"), ("batch size", "batch_size")))
        if name in reported
    ]
    if batch:
        yield chart("batch size", batch, axis, RATE)
    if "kv_cache_usage" in reported:
        yield chart("KV memory in use", [Series("", *reported["kv_cache_usage"], 2)], axis, SHARE)
    if "num_waiting" in reported:
        yield chart("requests waiting", [Series("", *reported["num_waiting"], 1)], axis, RATE)
    if "num_preemptions" in reported and len(reported["num_preemptions"][0]) > 1:
        yield chart("preemptions/s", [Series("", *_growth(*reported["num_preemptions"]), 3)], axis, RATE)


def _growth(times_s: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return the growth of a counter per second. A counter that decreased belongs to a server that was restarted."""
    steps = np.diff(counts)
    return times_s[1:], np.where(steps >= 0.0, steps, counts[1:]) / np.maximum(np.diff(times_s), 1e-9)


def _show_failures(parent: Element, run: Run, axis: Axis, bin_s: float) -> None:
    if not run.summary.failures:
        element(parent, "p", "No request failed.")
        return
    measured = run.measured
    edges_s = np.arange(0.0, (axis.high or 0.0) + 2.0 * bin_s, bin_s)
    places = np.flatnonzero(measured.is_failed)
    failed = [measured.records[int(place)] for place in places]
    labels = [outcome_label(each.outcome, each.status, each.error) for each in failed]
    frequent = [label for label, _ in Counter(labels).most_common(MAX_ERRORS)]
    kinds = np.array([frequent.index(label) if label in frequent else MAX_ERRORS for label in labels])
    series = []
    for kind, label in enumerate([*frequent, "others"]):
        nums = np.histogram(measured.ended_s[places[kinds == kind]], edges_s)[0]
        if nums.any():
            series.append(Series(label, edges_s[:-1] + bin_s / 2.0, nums / bin_s, FAILED - kind))
    _show(parent, [chart("failures/s", series, axis, RATE)])
    rows = [[failure_label(each), as_number(each.num)] for each in run.summary.failures[:100]]
    _show_table(parent, ["failure", "requests"], rows)


def _show_times(parent: Element, what: str, figures: Figures, event_loop_lag_s: Distribution | None = None) -> None:
    element(parent, "p", f"{what}, from {figures.from_s:.2f} s to {figures.to_s:.2f} s:")
    heads = ["", "number", *(name.replace("p999", "p99.9") for name in PERCENTILES)]
    _show_table(parent, heads, percentile_rows(figures, event_loop_lag_s))


def _show_table(parent: Element, heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> None:
    table = element(element(parent, "div", class_="scroll"), "table", class_=kind)
    line = element(table, "tr")
    for head in heads:
        element(line, "th", head)
    for row in rows:
        line = element(table, "tr")
        for cell in row:
            element(line, "td", cell, class_="bad" if cell.endswith(BAD) else "")


def _show_environment(parent: Element, summary: Summary) -> None:
    element(parent, "pre", summary.environment.command)
    environment = msgspec.to_builtins(summary.environment)
    server_info = environment.pop("server_info")
    for name, value in (
        ("environment", environment),
        ("settings", msgspec.to_builtins(summary.settings)),
        ("the server's /info", server_info),
    ):
        if value is not None:
            element(parent, "p", name)
            element(parent, "pre", json.dumps(value, indent=2, ensure_ascii=False))


# -- several runs -----------------------------------------------------------------------------------------------------


def _show_sweep(parent: Element, runs: Sequence[Run]) -> None:
    element(parent, "h2", "Throughput against latency")
    is_invalid = np.array([not run.summary.is_valid for run in runs])
    full = [run.summary.full for run in runs]
    tokens = np.array([each.output_tokens_per_s for each in full])
    requests = np.array([each.requests_per_s for each in full])
    notes = [run.label for run in runs]
    charts = []
    for name, of in (
        ("TTFT", [each.ttft_s for each in full]),
        ("TPOT", [each.tpot_s for each in full]),
        ("E2E", [each.e2e_s for each in full]),
    ):
        series = [
            Series("p50", tokens, _percentile(of, "p50"), 0, notes=notes),
            Series("p99", tokens, _percentile(of, "p99"), 1, notes=notes),
        ]
        if is_invalid.any():
            doubtful = [f"{note}, not valid" for note, is_it in zip(notes, is_invalid, strict=True) if is_it]
            marks = np.concatenate([each.y[is_invalid] for each in series])
            places = np.tile(tokens[is_invalid], 2)
            series.append(Series("not valid", places, marks, FAILED, is_points=True, notes=doubtful * 2, radius=5.0))
        charts.append(chart(name, series, Axis("output tokens/s", as_number), LATENCY, width=460.0))
    if any(each.goodput for each in full):
        good = np.array([each.goodput.requests_per_s if each.goodput else np.nan for each in full])
        share = np.array([each.goodput.share if each.goodput else np.nan for each in full])
        answered = Axis("requests answered/s", as_number)
        both = [
            Series("answered", requests, requests, 1, is_dashed=True),
            Series("good", requests, good, 2, notes=notes),
        ]
        charts.append(chart("goodput, requests/s", both, answered, RATE, width=460.0))
        charts.append(
            chart("goodput, share", [Series("", requests, share, 2, notes=notes)], answered, SHARE, width=460.0)
        )
    _show(parent, charts, "charts small")
    columns = [headline(run.summary, run.summary.full) for run in runs]
    for run, column in zip(runs, columns, strict=True):
        column["failures"] = frequent_failures(run.summary)
        column["valid"] = "yes" if run.summary.is_valid else NOT_VALID
    names = list(dict.fromkeys(name for column in columns for name in column))
    element(parent, "h2", "Figures")
    rows = [[name, *(column.get(name, NOTHING) for column in columns)] for name in names]
    _show_table(parent, ["", *distinct([run.label for run in runs])], rows, "columns")


def _by_load(runs: Sequence[Run]) -> Sequence[Run]:
    """Sort by requested rate or number of clients, if all runs have one, because a line joins neighbours."""
    found = [LOAD.match(run.summary.settings.arrivals) for run in runs]
    loads = [float(each[1]) for each in found if each is not None]
    if len(loads) < len(runs):
        return runs
    return [run for _, run in sorted(zip(loads, runs, strict=True), key=lambda each: each[0])]


def _percentile(distributions: Sequence[Distribution | None], name: str) -> Floats:
    return np.array([np.nan if each is None else getattr(each, name) for each in distributions], np.float64)
