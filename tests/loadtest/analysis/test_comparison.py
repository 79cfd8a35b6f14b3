"""Test comparing two runs: equal servers are not called faster, and faster ones are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from loadtest.analysis.comparison import FASTER, NO_DIFFERENCE, SLOWER, TOO_SHORT, Comparison, Side, compare
from loadtest.analysis.measurements import Measurements, measure
from loadtest.analysis.summarise import summarise
from loadtest.analysis.summary import Environment, ServerFigure, Summary
from loadtest.planning.plan import Plan, Request
from loadtest.record import Outcome, Record
from loadtest.reporting.markdown import comparison_table
from loadtest.target import ApiFormat, Target


def a_run(generator: np.random.Generator, pace: float = 1.0, num: int = 400, num_tokens: int = 4) -> Measurements:
    """A closed loop of four clients: each asks as soon as it was answered."""
    records = []
    clocks = [0.0] * 4
    for index in range(num):
        client = min(range(4), key=clocks.__getitem__)
        start_s = clocks[client]
        times = start_s + pace * np.cumsum(generator.gamma(4.0, 0.025, num_tokens))
        clocks[client] = float(times[-1])
        records.append(
            Record(index, start_s, start_s, times.tolist(), None, clocks[client], Outcome.OK, 200, "", 1, num_tokens)
        )
    return measure(records)


def compared(a: Sequence[Measurements], b: Sequence[Measurements], seed: int = 0, num: int = 400) -> Comparison:
    return compare(Side("main", a), Side("branch", b), np.random.default_rng(seed), num)


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {each.name: each.verdict for each in comparison.figures}


def test_of_the_same_server_hardly_any_difference_is_seen() -> None:
    generator = np.random.default_rng(1)
    comparisons = [compared([a_run(generator)], [a_run(generator)], seed, num=200) for seed in range(20)]
    found = [each.verdict != NO_DIFFERENCE for comparison in comparisons for each in comparison.figures]
    assert len(found) == 200
    # 5 % are expected. Figures of one run depend on each other, so 20 runs may well give twice that.
    assert sum(found) <= 20


def queues(generator: np.random.Generator, num: int, pace: float = 1.0, load: float = 0.8) -> Iterator[Measurements]:
    """M/M/1 queues without end, by Lindley's recursion: each waits for what is left of those before, if anything is."""
    records = [Record(index, 0.0, 0.0, [1.0], None, 1.0, Outcome.OK, 200, "", 1, 1) for index in range(num)]
    form = measure(records)
    while True:
        intended_s = np.cumsum(generator.exponential(1.0, num))
        service_s = pace * generator.exponential(load, num)
        ahead_s = np.cumsum(np.concatenate([[0.0], service_s[:-1] - np.diff(intended_s)]))
        ended_s = intended_s + ahead_s - np.minimum.accumulate(ahead_s) + service_s
        times = {"ended_s": ended_s, "answered_s": ended_s, "first_s": ended_s, "last_s": ended_s, "event_s": ended_s}
        yield msgspec.structs.replace(form, intended_s=intended_s, started_s=intended_s, **times)


def test_a_queue_is_hardly_ever_called_faster_than_itself() -> None:
    generator = np.random.default_rng(10)
    for num, min_share in ((1000, 0.0), (6000, 0.9)):
        runs = queues(generator, num)
        found = [
            each.verdict
            for seed in range(40)
            for each in compared([next(runs)], [next(runs)], seed, num=120).figures
            if each.name in ("TTFT p50", "TTFT p99")
        ]
        assert len(found) == 80
        # 5 % are expected of infinitely long runs.
        assert sum(verdict in (FASTER, SLOWER) for verdict in found) <= 0.15 * 80, Counter(found)
        assert sum(verdict != TOO_SHORT for verdict in found) >= min_share * 80, Counter(found)


def test_a_queue_that_is_much_shorter_is_called_faster() -> None:
    generator = np.random.default_rng(11)
    comparison = compared([next(queues(generator, 8000))], [next(queues(generator, 8000, pace=0.6))])
    assert verdicts(comparison)["TTFT p50"] == verdicts(comparison)["TTFT p99"] == FASTER


def test_a_run_too_short_for_its_queue_gets_no_interval_but_the_length_it_needs() -> None:
    generator = np.random.default_rng(12)
    runs = queues(generator, 500, load=0.95)
    comparison = compared([next(runs)], [next(runs)])
    short = [each for each in comparison.figures if each.verdict == TOO_SHORT]
    assert {each.name for each in short} == {"TTFT p50", "TTFT p99", "E2E p50", "E2E p99"}
    assert all(each.low is None and each.high is None and each.ratio == each.b / each.a for each in short)
    assert any(each.startswith("main is too short for intervals of latencies: ") for each in comparison.warnings)
    assert "| - | too short to tell |" in comparison_table(comparison)
    repeated = compared([next(runs) for _ in range(5)], [next(runs) for _ in range(5)])
    assert TOO_SHORT not in verdicts(repeated).values(), "five runs are five pieces"


@pytest.mark.parametrize(("pace", "verdict"), [(0.8, FASTER), (1.25, SLOWER)])
def test_a_difference_of_a_fifth_is_found_in_medians_and_rates(pace: float, verdict: str) -> None:
    generator = np.random.default_rng(2)
    comparison = compared([a_run(generator)], [a_run(generator, pace)])
    found = verdicts(comparison)
    for name in ("TTFT p50", "TPOT p50", "longest pause p50", "E2E p50", "output tokens", "requests"):
        assert found[name] == verdict, name


def test_intervals_hold_the_truth_about_as_often_as_promised() -> None:
    num_held: Counter[str] = Counter()
    for seed in range(25):
        generator = np.random.default_rng(seed)
        for each in compared([a_run(generator)], [a_run(generator, 0.8)], seed, num=200).figures:
            truth = 0.8 if each.unit == "s" else 1.25
            assert each.low is not None and each.high is not None
            num_held[each.name] += each.low <= truth <= each.high
    assert len(num_held) == 10
    # Of 25 with 95 % each, fewer than 19 have a chance of one in five thousand.
    assert min(num_held.values()) >= 19
    assert num_held.total() >= 0.91 * 250


def test_figures_are_of_all_runs_of_a_side_together() -> None:
    generator = np.random.default_rng(3)
    runs = [a_run(generator, pace) for pace in (1.0, 2.0)]
    comparison = compared(runs, [a_run(generator)])
    by_name = {each.name: each for each in comparison.figures}
    assert by_name["TTFT p99"].a == pytest.approx(np.percentile(np.concatenate([each.ttft_s for each in runs]), 99))
    spans_s = sum(each.span_s()[1] - each.span_s()[0] for each in runs)
    assert by_name["requests"].a == pytest.approx(800 / spans_s)
    assert by_name["requests"].ratio == pytest.approx(by_name["requests"].b / by_name["requests"].a)


def test_repetitions_keep_a_lucky_run_from_being_called_faster() -> None:
    generator = np.random.default_rng(4)
    # The same machine, that is now and then a third slower.
    moods = [1.0, 1.35, 1.0, 1.3]
    assert verdicts(compared([a_run(generator, 1.35)], [a_run(generator, 1.0)]))["E2E p50"] == FASTER
    a, b = ([a_run(generator, mood) for mood in order] for order in (moods, moods[::-1]))
    assert verdicts(compared(a, b))["E2E p50"] == NO_DIFFERENCE


def test_the_same_seed_gives_the_same_intervals() -> None:
    generator = np.random.default_rng(5)
    a, b = a_run(generator), a_run(generator)
    assert compared([a], [b], seed=1) == compared([a], [b], seed=1)
    assert compared([a], [b], seed=1) != compared([a], [b], seed=2)


def test_figures_that_one_side_lacks_are_left_out() -> None:
    generator = np.random.default_rng(6)
    found = verdicts(compared([a_run(generator)], [a_run(generator, num_tokens=1)]))
    assert set(found) == {"TTFT p50", "TTFT p99", "E2E p50", "E2E p99", "output tokens", "requests"}
    nobody = measure([Record(0, 0.0)])
    assert verdicts(compared([nobody], [a_run(generator)])) == {}


# -- what makes it doubtful -------------------------------------------------------------------------------------------


def summary_of(
    measured: Measurements, arrivals: str = "closed:4", seed: int = 1, api: ApiFormat = ApiFormat.CHAT
) -> Summary:
    requests = [Request(index, None, "", 4) for index in range(len(measured.records))]
    return summarise(
        Plan(requests, arrivals, "fixed", seed, num_clients=4),
        measured,
        Target(["http://127.0.0.1:8000"], api),
        Environment("", "", "", ""),
    )


def test_different_settings_give_a_warning() -> None:
    generator = np.random.default_rng(7)
    a, b = [a_run(generator), a_run(generator)], [a_run(generator), a_run(generator)]
    same = [summary_of(run) for run in a]
    assert compare(Side("main", a, same), Side("branch", b, same), generator, 100).warnings == []
    other = [
        summary_of(b[0], "poisson:20", seed=2, api=ApiFormat.TGI),
        summary_of(b[1], "poisson:20", seed=2, api=ApiFormat.TGI),
    ]
    assert compare(Side("main", a, same), Side("branch", b, other), generator, 100).warnings == [
        "arrivals differs: closed:4 in main, poisson:20 in branch",
        "seed differs: 1 in main, 2 in branch",
        "api differs: chat in main, tgi in branch",
    ]


def test_repetitions_may_have_seeds_of_their_own_if_both_sides_have_the_same() -> None:
    generator = np.random.default_rng(14)
    run = a_run(generator)
    seeds = [[1, 2, 3], [3, 1, 2], [4, 5, 6]]
    a, same, other = ([summary_of(run, seed=seed) for seed in each] for each in seeds)
    sides = [Side(name, [run] * 3, each) for name, each in (("a1", a), ("b1", same), ("c1", other))]
    assert compare(sides[0], sides[1], generator, 100).warnings == []
    warnings = compare(sides[0], sides[2], generator, 100).warnings
    assert warnings == ["seed differs: 1 and 2 and 3 in a1, 4 and 5 and 6 in c1"]


@pytest.mark.parametrize(("hits", "is_told"), [(150.0, True), (100.0, False)])
def test_different_prefix_cache_hit_rates_give_a_warning(hits: float, is_told: bool) -> None:
    generator = np.random.default_rng(15)
    run = a_run(generator)
    summary = summary_of(run)

    def with_hits(increase: float) -> Summary:
        server = {
            "num_prefix_cache_queries": ServerFigure(0.0, 0.0, 1000.0),
            "num_prefix_cache_hits": ServerFigure(0.0, 0.0, increase),
        }
        return msgspec.structs.replace(summary, server=server)

    main, branch = Side("main", [run] * 2, [with_hits(0.0)] * 2), Side("branch", [run] * 2, [with_hits(hits)] * 2)
    warnings = compare(main, branch, generator, 100).warnings
    assert len(warnings) == is_told
    if is_told:
        assert "held 0% of prompt tokens in main, 15% in branch" in warnings[0] and "--seed" in warnings[0]


def test_different_prompt_lengths_give_a_warning() -> None:
    generator = np.random.default_rng(13)
    run = a_run(generator)
    summary = summary_of(run)
    settings = msgspec.structs.replace(summary.settings, characters_per_token=3.3)
    sides = [
        Side("main", [run] * 2, [summary] * 2),
        Side("branch", [run] * 2, [msgspec.structs.replace(summary, settings=settings)] * 2),
    ]
    warnings = compare(sides[0], sides[1], generator, 100).warnings
    assert warnings == ["characters_per_token differs: None in main, 3.3 in branch"]


def test_single_runs_invalid_runs_failures_and_different_lengths_give_warnings() -> None:
    generator = np.random.default_rng(8)
    a, b = a_run(generator), a_run(generator, num_tokens=6)
    for record in b.records[:40]:
        record.outcome = Outcome.CUT
    late = [Record(0, 0.0, 1.0, [2.0], None, 2.0, Outcome.OK, 200, num_output_tokens=1)]
    b = measure([*b.records[:-1], *late])
    warnings = compare(Side("main", [a]), Side("branch", [b], [summary_of(b)]), generator, 100).warnings
    assert "main is one run: intervals do not include differences from run to run" in warnings
    assert "1 of 1 runs of branch are not valid" in warnings
    assert "0.00% of the requests failed in main, 10.00% in branch; latencies leave them out" in warnings
    assert "answers have 4 tokens on average in main, 5.986 in branch" in warnings


def test_the_table_has_a_row_for_each_figure_and_warnings_below() -> None:
    generator = np.random.default_rng(9)
    comparison = compared([a_run(generator)], [a_run(generator)])
    lines = comparison_table(comparison).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(comparison.figures)
    assert {line.count("|") for line in lines[: 2 + len(comparison.figures)]} == {7}
    assert sum(line.startswith("- Note: ") for line in lines) == len(comparison.warnings) == 2
