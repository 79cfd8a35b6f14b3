"""Test reports: the page needs no other file, escapes all text, and keeps outliers."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import msgspec
import numpy as np
import pytest

from loadtest.analysis import slo
from loadtest.analysis.measurements import measure
from loadtest.analysis.server_metrics import Scrape
from loadtest.analysis.summarise import summarise
from loadtest.analysis.summary import Environment, Summary
from loadtest.planning.plan import Plan, Request
from loadtest.record import Counted, Outcome, Record
from loadtest.reporting import html_report as report
from loadtest.reporting.charts import Axis, Series, chart, cumulative, downsample_line, downsample_points
from loadtest.reporting.formatting import as_number, as_share, as_time, distinct
from loadtest.reporting.html_report import Run, render, write
from loadtest.reporting.markdown import table
from loadtest.target import ApiFormat, Target

HOSTILE = "<script>alert('1')</script> & \"quoted\" | `cell` ]]> \x1b[31m\x00\ud800 [link](javascript:x) ![](x)"
VOID = {"meta", "br", "hr", "img", "input", "link"}


def a_run(
    num: int = 300, rate: float = 10.0, num_tokens: int = 5, text: str = "queue_full", objectives: str = "ttft:200ms"
) -> Run:
    generator = np.random.default_rng(1)
    starts = np.cumsum(generator.exponential(1.0 / rate, num)).tolist()
    waits = generator.exponential(0.05, (num, num_tokens)).cumsum(axis=1).tolist()
    records = []
    for index, (start_s, wait) in enumerate(zip(starts, waits, strict=True)):
        if index % 50 == 7:
            records.append(
                Record(index, start_s, start_s, ended_s=start_s + 0.01, outcome=Outcome.REFUSED, status=503, error=text)
            )
            continue
        times = [start_s + each for each in wait]
        records.append(
            Record(
                *(index, start_s, start_s + 0.0001, times, None, times[-1], Outcome.OK, 200, "", 20, num_tokens),
                counted_by=Counted.USAGE,
            )
        )
    scrapes: list[Scrape] = [
        (
            float(second),
            {
                "servekit_num_requests_running": 3.0 + second % 5,
                "servekit_scheduler_batch_size": 3.0 + second % 4,
                "servekit_num_requests_waiting": float(second % 3),
                "servekit_kv_cache_usage_perc": 0.5,
                "servekit_num_preemptions_total": float(second // 10),
            },
        )
        for second in range(int(num / rate))
    ]
    requests = [Request(index, start_s, "", num_tokens) for index, start_s in enumerate(starts)]
    measured = measure(records)
    summary = summarise(
        Plan(requests, f"poisson:{rate:g}", text, seed=1),
        measured,
        Target(["http://127.0.0.1:8000"], ApiFormat.COMPLETIONS, fields={"stop": text}),
        Environment(text, "3.11", f"loadtest run {text}", "2026", server_info={"model": text}),
        slo.parse(objectives),
        scrapes=scrapes,
        notes=[text],
        event_loop_lags_s=[0.0001] * 99 + [0.0015],
    )
    return Run(f"poisson:{rate:g} {text}", measured, summary, scrapes)


class Nesting(HTMLParser):
    """Follows a page as a browser would; every element that is not void has to be closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        # HTML knows no such thing outside of SVG: `<div />` is one that is never closed.
        assert "svg" in self.open or tag in VOID, f"<{tag} /> is not closed"
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.text.append(text)


def parsed(page: str) -> tuple[Nesting, Element]:
    nesting = Nesting()
    nesting.feed(page)
    nesting.close()
    assert nesting.open == []
    return nesting, ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))  # noqa: S314 (our own)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    for page in (render([a_run()]), render([a_run(rate=rate) for rate in (5.0, 10.0, 20.0)], "Sweep")):
        nesting, _ = parsed(page)
        assert not nesting.tags & {"script", "link", "img", "iframe", "object", "embed", "image", "use", "a", "base"}
        names = {name for name, _ in nesting.attributes}
        assert not {name for name in names if name.startswith("on")} | names & {"src", "href", "xlink:href", "style"}
        assert "url(" not in page and "@import" not in page


def test_text_from_servers_and_users_is_escaped() -> None:
    page = render([a_run(text=HOSTILE), a_run(text=HOSTILE)], title=HOSTILE)
    nesting, _ = parsed(page)
    assert not nesting.tags & {"script", "img", "a"}
    assert "<script" not in page and "\x1b" not in page and "\x00" not in page
    page.encode("utf-8")
    assert any("<script>alert('1')</script>" in text for text in nesting.text), "and can be read"


def test_the_page_has_all_charts_and_figures() -> None:
    page = render([a_run(objectives="ttft:200ms,ttft_p99:1ms")])
    _, root = parsed(page)
    titles = [svg.findtext("title") for svg in root.iter("svg")]
    assert titles == [
        *("TTFT", "E2E", "TTFT, share of all", "ITL, share of all", "E2E, share of all"),
        *("output tokens/s", "requests in flight", "requests/s"),
        *("batch size", "KV memory in use", "requests waiting", "preemptions/s", "failures/s"),
    ]
    text = "".join(root.itertext())
    for words in (
        "goodput (ttft:200ms",
        ": MISSED",
        "client event loop lag p99 / max",
        "refused 503 queue_full",
        "p99.9",
        "loadtest run",
        '"seed": 1',
    ):
        assert words in text, words
    sweep = render([a_run(rate=rate) for rate in (5.0, 10.0)])
    titles = [svg.findtext("title") for svg in parsed(sweep)[1].iter("svg")]
    assert titles[:5] == ["TTFT", "TPOT", "E2E", "goodput, requests/s", "goodput, share"]


def test_a_search_is_drawn_by_rate_with_its_result_and_what_is_not_valid() -> None:
    runs = [a_run(rate=rate) for rate in (10.0, 5.0, 20.0)]
    invalid = msgspec.structs.replace(runs[2].summary, is_valid=False)
    runs[2] = msgspec.structs.replace(runs[2], summary=invalid)
    page = render(runs, "Search", "12 requests/s meet the limits")
    _, root = parsed(page)
    assert page.index("12 requests/s meet the limits") < page.index("<svg")
    first = next(root.iter("svg"))
    path = next(each for each in first.iter("path")).get("d", "")
    across = [float(each.split()[0]) for each in path[1:].split("L")]
    assert len(across) == 3 and across == sorted(across), "and not from probe to probe"
    assert [each.text for each in first.iter("title")].count("poisson:20 queue_full, not valid") == 2
    # A column for each run, as in the Markdown, so that all figures are seen without scrolling.
    rows = [[cell.text for cell in row] for row in next(root.iter("table"))]
    assert [each.split()[0] for each in rows[0][1:] if each] == ["poisson:5", "poisson:10", "poisson:20"]
    reported = {row[0]: row[1:] for row in rows}
    assert reported["valid"] == ["yes", "yes", "NO"] and reported["failures"] == ["6 refused 503 queue_full"] * 3


@pytest.mark.parametrize(("end_s", "num_bins"), [(2.0, 20), (10.0, 20), (40.0, 40), (600.0, 60)])
def test_lines_over_time_are_coarse_enough_to_show_a_trend(end_s: float, num_bins: int) -> None:
    assert end_s / report._bin_s(end_s) == pytest.approx(num_bins)


def test_the_page_of_an_invalid_run_begins_with_the_reason() -> None:
    run = a_run()
    run.measured.records[0].started_s += 10.0
    broken = summarise(
        Plan([], "poisson:1", "fixed", 1), run.measured, Target([], ApiFormat.CHAT), Environment("", "", "", "")
    )
    page = render([Run("broken", run.measured, broken)])
    assert 0 < page.index("This run is not valid") < page.index("<svg")


def test_an_empty_run_has_a_page() -> None:
    for records in ([], [Record(0, 0.0)], [Record(0, 0.0, 0.0, ended_s=0.0, outcome=Outcome.UNREACHED)]):
        measured = measure(records)
        summary = summarise(
            Plan([], "poisson:1", "fixed", 1), measured, Target([], ApiFormat.CHAT), Environment("", "", "", "")
        )
        parsed(render([Run("nothing", measured, summary)]))
        parsed(render([Run("nothing", measured, summary)] * 2))


def test_a_large_run_makes_a_small_page_and_its_worst_request_is_on_it(tmp_path: Path) -> None:
    run = a_run(num=50_000, rate=1000.0, num_tokens=2)
    write(tmp_path / "report.html", [run])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 600_000
    worst = float(np.nanmax(run.measured.e2e_s))
    at = as_time(worst)
    assert f": {at}</title>" in page


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_thinning_keeps_the_extremes_wherever_they_are() -> None:
    generator = np.random.default_rng(2)
    x, y = np.sort(generator.uniform(0.0, 100.0, 50_000)), generator.normal(size=50_000)
    for place in (0, 17, 25_000, 49_999):
        spiked = y.copy()
        spiked[place] = 1000.0
        spiked[(place + 20_000) % 50_000] = -1000.0
        thin_x, thin_y = downsample_line(x, spiked)
        assert len(thin_x) <= 4 * 360 and (thin_y.max(), thin_y.min()) == (1000.0, -1000.0)
        assert thin_x[0] == x[0] and thin_x[-1] == x[-1] and (np.diff(thin_x) >= 0.0).all()
        kept = downsample_points(x, spiked, 1000)
        assert len(kept) <= 1000 and place in kept and (place + 20_000) % 50_000 in kept
    few = downsample_points(x[:10], y[:10], 1000)
    assert few.tolist() == list(range(10))


def test_a_thinned_line_has_the_outline_of_the_whole_one() -> None:
    x = np.linspace(0.0, 1.0, 100_000)
    y = np.random.default_rng(3).normal(size=100_000).cumsum()
    thin_x, thin_y = downsample_line(x, y)
    for column in range(360):
        whole = y[(x >= column / 360) & (x < (column + 1) / 360)]
        thinned = thin_y[(thin_x >= column / 360) & (thin_x < (column + 1) / 360)]
        assert (thinned.min(), thinned.max()) == (whole.min(), whole.max())


def test_a_cumulative_curve_is_the_distributions_from_end_to_end() -> None:
    values = np.random.default_rng(4).exponential(size=10_000)
    x, share = cumulative(values)
    assert (x[0], x[-1], share[-1]) == (values.min(), values.max(), 1.0)
    for at, reported in zip(x, share, strict=True):
        assert reported == pytest.approx((values <= at).mean())
    assert len(x) < 400 and (share > 0.999).sum() >= 8, "the tail is drawn"
    assert cumulative(np.array([math.nan]))[0].size == 0


def pixels(svg: Element) -> list[tuple[float, float]]:
    return [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in svg.iter("circle")]


def test_points_are_where_their_values_are() -> None:
    x, y = np.array([0.0, 5.0, 10.0]), np.array([0.0, 50.0, 100.0])
    (left, bottom), middle, (right, top) = pixels(chart("", [Series("", x, y, is_points=True)], Axis(), Axis()))
    assert middle == ((left + right) / 2, (top + bottom) / 2) and left < right and top < bottom
    logarithmic = Axis(is_logarithmic=True)
    y = np.array([0.001, 0.1, 10.0])
    (_, bottom), (_, between), (_, top) = pixels(chart("", [Series("", x, y, is_points=True)], Axis(), logarithmic))
    assert between == pytest.approx((top + bottom) / 2, abs=0.1)


def test_a_line_is_broken_where_there_is_nothing() -> None:
    y = np.array([1.0, 2.0, math.nan, 3.0, math.inf, 4.0, 5.0])
    svg = chart("", [Series("", np.arange(7.0), y)], Axis(), Axis())
    path = next(each for each in svg.iter("path")).get("d", "")
    assert path.count("M") == 3 and "nan" not in path and "inf" not in path
    assert len(pixels(svg)) == 5


@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_ticks_are_within_the_picture_and_their_labels_differ(is_logarithmic: bool) -> None:
    generator = np.random.default_rng(5)
    for _ in range(200):
        low = 10.0 ** generator.uniform(-5.0, 3.0)
        y = np.array([low, low * 10.0 ** generator.uniform(0.01, 4.0)])
        axis = Axis(text=as_time, is_logarithmic=is_logarithmic)
        svg = chart("", [Series("", np.array([0.0, 1.0]), y)], Axis(), axis)
        lines = [float(each.get("y1", "")) for each in svg.iter("line") if each.get("class") == "grid"]
        assert 1 <= len(lines) <= 14 and all(26.0 - 0.1 <= place <= 186.0 + 0.1 for place in lines)
        labels = [each.text for each in svg.iter("text") if each.get("class") == "tick end" and each.get("x") == "58.0"]
        assert len(labels) == len(lines)


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (1e-7, "0.1 µs"), (0.00015, "150 µs"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (75.25, "75.2 s")],
)
def test_times_have_the_unit_that_fits(value: float, text: str) -> None:
    assert as_time(value) == text
    assert as_time(None) == "-"


def test_numbers_are_grouped_and_shares_are_whole_only_if_all_are() -> None:
    assert [as_number(each) for each in (0.0, 3.0, 3.14159, 99.96, 102_000.4)] == ["0", "3", "3.14", "100", "102,000"]
    shares = [as_share(each) for each in (0.0, 1.0, 0.5, 0.99999, 0.99999999, 1e-5, 1e-9)]
    assert shares == ["0.00 %", "100.00 %", "50.00 %", "99.999 %", "> 99.9999 %", "0.001 %", "< 0.0001 %"]


def test_several_runs_are_one_table_with_a_column_each() -> None:
    runs = [a_run(rate=rate, text=text) for rate, text in ((5.0, "queue_full"), (10.0, HOSTILE))]
    text = table([each.summary for each in runs], [each.label for each in runs])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    # A bar that is not escaped would be another column.
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}
    assert "requests answered | 294 of 300 | 294 of 300 |" in text
    assert "6 refused 503 queue_full" in text
    assert "| valid | yes | yes |" in text and "<script" not in text.replace("\\<", "").split("loadtest run")[0]
    assert "on queue_full, Python 3.11" in text and "`loadtest run queue_full`" in text


def test_repetitions_that_are_called_alike_are_numbered() -> None:
    assert distinct(["a1", "b1", "a1"]) == ["a1 (1 of 2)", "b1", "a1 (2 of 2)"]


def test_the_table_shows_which_run_is_not_valid_and_why() -> None:
    run = a_run()
    doubtful = summarise(
        Plan([Request(9999, 0.0, "", 1)], "poisson:1", "fixed", 1),
        run.measured,
        Target([], ApiFormat.CHAT),
        Environment("a machine", "3.11", "command with `backticks`", "2026"),
    )
    text = table([run.summary, doubtful], ["before", "after"])
    assert "| valid | yes | **no** |" in text
    assert "**not valid**: 1 of 1 planned requests have no record" in text
    assert "`` command with `backticks` ``" in text


def test_a_summary_from_a_file_makes_the_same_table() -> None:
    summary = a_run(objectives="ttft:200ms,ttft_p99:1s").summary
    again = msgspec.json.decode(msgspec.json.encode(summary), type=Summary)
    assert table([again], ["run"]) == table([summary], ["run"])
