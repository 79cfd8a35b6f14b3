"""Test the figures of a run, on runs small enough to be worked out by hand."""

from __future__ import annotations

import csv
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest import experiment
from loadtest.analysis import slo
from loadtest.analysis.measurements import Measurements, measure
from loadtest.analysis.server_metrics import server_series
from loadtest.analysis.steady_state import steady_window
from loadtest.analysis.summarise import summarise
from loadtest.analysis.summary import Client, Environment, Summary, prefix_cache_hit_rate
from loadtest.analysis.timeline import timeline, write_csv
from loadtest.analysis.validity import lag_limit_for_s
from loadtest.errors import LoadTestError
from loadtest.planning.plan import Plan, Request
from loadtest.record import Counted, Outcome, Record
from loadtest.reporting.formatting import headline
from loadtest.target import ApiFormat, Target

TARGET = Target(["http://127.0.0.1:8000"], ApiFormat.COMPLETIONS)
ENVIRONMENT = Environment("2 cores", "3.11", "python -m loadtest run", "2026-01-01T00:00:00Z")


def answered(
    index: int,
    intended_s: float,
    token_times_s: Sequence[float],
    *,
    started_s: float | None = None,
    ended_s: float | None = None,
    num_tokens: int | None = None,
    tokens_per_event: list[int] | None = None,
    num_prompt_tokens: int | None = 10,
    process: int = 0,
) -> Record:
    if num_tokens is None:
        num_tokens = sum(tokens_per_event) if tokens_per_event else len(token_times_s)
    return Record(
        index,
        intended_s,
        started_s=intended_s if started_s is None else started_s,
        token_times_s=list(token_times_s),
        tokens_per_event=tokens_per_event,
        ended_s=token_times_s[-1] if ended_s is None else ended_s,
        outcome=Outcome.OK,
        status=200,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_tokens,
        counted_by=Counted.USAGE,
        process=process,
    )


def failed(index: int, intended_s: float, ended_s: float, outcome: Outcome = Outcome.REFUSED) -> Record:
    return Record(index, intended_s, intended_s, ended_s=ended_s, outcome=outcome, status=503, error="queue_full")


def planned(num: int, **settings: object) -> Plan:
    requests = [Request(index, float(index), "prompt", 8) for index in range(num)]
    return msgspec.structs.replace(Plan(requests, "poisson:1", "fixed", seed=7), **settings)


def summary_of(records: Sequence[Record], objectives: str | None = None, **more: object) -> Summary:
    plan = more.pop("plan", planned(len(records)))
    target = more.pop("target", TARGET)
    asked = slo.parse(objectives) if objectives else None
    return summarise(plan, measure(records), target, ENVIRONMENT, asked, **more)  # type: ignore[arg-type]


# -- one request ------------------------------------------------------------------------------------------------------


def test_latencies_are_reported_from_the_intended_and_the_actual_start() -> None:
    record = answered(0, 1.0, [1.5, 1.6, 1.8], started_s=1.1, ended_s=2.0)
    figures = summary_of([record]).full
    reported = [
        each.p50 if each else None
        for each in (figures.ttft_s, figures.ttft_from_start_s, figures.e2e_s, figures.e2e_from_start_s)
    ]
    assert reported == pytest.approx([0.5, 0.4, 1.0, 0.9])
    assert figures.second_token_s is not None and figures.second_token_s.p50 == pytest.approx(0.1)
    assert figures.tpot_s is not None and figures.tpot_s.p50 == pytest.approx(0.15)
    assert figures.client_lag_s is not None and figures.client_lag_s.p50 == pytest.approx(0.1)
    assert figures.tokens_per_s_per_user is not None
    assert figures.tokens_per_s_per_user.p50 == pytest.approx(1.0 / 0.15)


def test_grouping_tokens_keeps_itl_and_tpot_and_lengthens_pauses() -> None:
    times = [1.0 + 0.1 * place for place in range(9)]
    smooth = measure([answered(0, 0.0, times)])
    # The same pace: one token, and then four at a time, when the last of them is there.
    together = measure([answered(0, 0.0, [times[0], times[4], times[8]], tokens_per_event=[1, 4, 4])])
    assert smooth.inter_token_s() == pytest.approx([0.1] * 8)
    assert together.inter_token_s() == pytest.approx([0.1] * 8)
    assert smooth.tpot_s == pytest.approx([0.1]) == together.tpot_s
    assert together.pause_s == pytest.approx([0.4, 0.4])
    assert together.longest_pause_s == pytest.approx([0.4])
    assert together.second_token_s == pytest.approx([0.4]), "two tokens of one event are not 0 s apart"


def test_tokens_of_the_first_event_took_no_time_after_it() -> None:
    record = answered(0, 0.0, [1.0, 2.0], tokens_per_event=[9, 1])
    assert measure([record]).tpot_s == pytest.approx([1.0]), "and not a ninth of that"


def test_an_answer_in_one_piece_has_no_time_per_token() -> None:
    whole = measure([answered(0, 0.0, [5.0], num_tokens=50), answered(1, 0.0, [], ended_s=5.0, num_tokens=50)])
    assert np.isnan(whole.tpot_s).all() and np.isnan(whole.tokens_per_s).all()
    assert whole.ttft_s.tolist() == pytest.approx([5.0, math.nan], nan_ok=True), "nobody saw a first one come"
    assert summary_of(whole.records).full.output_tokens_per_s == pytest.approx(20.0)
    assert timeline(whole).output_tokens_per_s == pytest.approx([0.0] * 4 + [100.0])


def test_the_lag_limit_of_answers_without_events_is_a_share_of_their_e2e_latency() -> None:
    late = [answered(index, float(index), [], started_s=index + 0.2, ended_s=index + 5.2) for index in range(20)]
    assert summary_of(late).is_valid
    late = [answered(index, float(index), [], started_s=index + 0.3, ended_s=index + 5.3) for index in range(20)]
    assert "250 ms are allowed (5 % of the median E2E" in summary_of(late).invalid_because[0]


def test_events_with_an_unknown_number_of_tokens_give_a_note() -> None:
    silent = answered(0, 0.0, [1.0, 2.0, 3.0], num_tokens=9)
    measured = measure([silent])
    assert measured.tpot_s == pytest.approx([2.0 / 8.0])
    assert measured.inter_token_s() == pytest.approx([1.0, 1.0]), "longer than they are, never shorter"
    assert measured.event_tokens.sum() == pytest.approx(9.0)
    assert any("more tokens than events" in note for note in summary_of([silent]).notes)
    assert not summary_of([answered(0, 0.0, [1.0, 2.0])]).notes


def test_failures_are_in_no_latency_and_in_no_throughput() -> None:
    broken = failed(1, 0.0, 0.001)
    broken.token_times_s, broken.num_output_tokens = [0.0005], 1
    summary = summary_of([answered(0, 0.0, [1.0, 2.0]), broken])
    assert summary.full.e2e_s is not None and summary.full.e2e_s.num == 1
    assert summary.full.output_tokens_per_s == pytest.approx(1.0)
    assert summary.full.requests_per_s == pytest.approx(0.5)
    assert summary.outcomes == {"ok": 1, "refused": 1}
    assert [(each.error, each.num) for each in summary.failures] == [("queue_full", 1)]
    assert "1 of 2 requests failed; latencies leave them out" in summary.notes


def test_records_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(LoadTestError, match="record 3 has 2 event times"):
        measure([answered(3, 0.0, [1.0, 2.0], tokens_per_event=[1])])
    with pytest.raises(LoadTestError, match="at least 1"):
        measure([answered(3, 0.0, [1.0, 2.0], tokens_per_event=[1, 0], num_tokens=1)])


def test_arrays_are_what_a_loop_over_the_records_finds() -> None:
    generator = np.random.default_rng(1)
    records = []
    for index in range(200):
        times = np.cumsum(generator.exponential(0.1, int(generator.integers(0, 6)))) + index
        counts = [int(each) for each in generator.integers(1, 4, len(times))]
        records.append(
            failed(index, index, index + 1.0)
            if generator.random() < 0.2
            else answered(index, index, times.tolist(), tokens_per_event=counts, ended_s=index + 5.0)
        )
    measured = measure(records)
    whole = [each for each in records if each.outcome is Outcome.OK]
    itl_s = [
        (later - earlier) / count
        for each in whole
        for earlier, later, count in zip(
            each.token_times_s, each.token_times_s[1:], (each.tokens_per_event or [])[1:], strict=False
        )
        for _ in range(count)
    ]
    assert measured.inter_token_s() == pytest.approx(itl_s)
    for place, each in enumerate(records):
        pauses = np.diff(each.token_times_s) if each.outcome is Outcome.OK else np.zeros(0)
        longest = measured.longest_pause_s[place]
        assert longest == pytest.approx(pauses.max()) if len(pauses) else math.isnan(longest)


# -- whether it can be believed ---------------------------------------------------------------------------------------


def steady_records(num: int = 200, lag_s: float = 0.0, ttft_s: float = 0.1) -> list[Record]:
    """One a second, which takes two."""
    return [
        answered(index, float(index), [index + lag_s + ttft_s, index + 2.0], started_s=index + lag_s)
        for index in range(num)
    ]


@pytest.mark.parametrize(
    ("lag_s", "ttft_s", "is_valid"),
    [(0.0049, 0.1, True), (0.0051, 0.1, False), (0.0019, 0.001, True), (0.0021, 0.001, False)],
)
def test_a_client_that_was_the_bottleneck_makes_the_run_invalid(lag_s: float, ttft_s: float, is_valid: bool) -> None:
    summary = summary_of(steady_records(lag_s=lag_s, ttft_s=ttft_s))
    assert summary.is_valid is is_valid
    assert is_valid or "the client was the bottleneck" in summary.invalid_because[0]
    # What is allowed is what is reported: 5 % of 0.1 s, and 2 ms where that is less.
    allowed = "5 ms are allowed (5 % of the median TTFT, at least 2 ms)" if ttft_s == 0.1 else "2 ms are allowed (5 %"
    assert is_valid or allowed in summary.invalid_because[0]


def test_a_stalled_event_loop_makes_the_run_invalid() -> None:
    summary = summary_of(steady_records(), event_loop_lags_s=[0.0001] * 90 + [0.02] * 10)
    assert "its event loop ran 20 ms late" in summary.invalid_because[0]
    assert summary_of(steady_records(), event_loop_lags_s=[0.0001] * 100).is_valid


def test_a_short_client_stall_is_noted_with_the_figures_it_may_distort() -> None:
    # 3,000 requests in 60 s, answered within 20 ms, and a client that does nothing for 300 ms from 30 s on.
    records = []
    for index in range(3000):
        at_s = index / 50.0
        held_s = 30.3 if 30.0 <= at_s < 30.3 else 0.0
        started_s = max(at_s, held_s)
        records.append(answered(index, at_s, [started_s + 0.02], started_s=started_s))
    lags_s = [0.0] * 29_850 + [0.3 * (1.0 - place / 150) for place in range(150)]
    summary = summary_of(records, event_loop_lags_s=lags_s)
    assert summary.is_valid and summary.full.ttft_s is not None and summary.full.ttft_s.max == pytest.approx(0.32)
    (note,) = summary.notes
    assert note.startswith("the client itself was up to 300 ms late, which may distort TTFT p99.9 (")
    assert "TTFT max (320 ms)" in note and "E2E max (320 ms)" in note and "pause" not in note
    rows = headline(summary, summary.full)
    assert rows["client event loop lag p99 / max"] == "0 s / 300 ms"
    assert rows["client lag p99.9 / max"].endswith(" / 300 ms")
    # Of an answer that takes ten seconds it is next to nothing.
    slow = [
        answered(each.index, each.intended_s, [each.started_s + 10.0], started_s=each.started_s) for each in records
    ]
    assert summary_of(slow, event_loop_lags_s=lags_s).notes == []


def test_an_error_of_the_client_makes_the_run_invalid() -> None:
    summary = summary_of(steady_records(10), errors=["process 0 of the client ended with -9"])
    assert not summary.is_valid and summary.invalid_because == ["process 0 of the client ended with -9"]
    assert summary.notes == []


def test_a_wait_for_one_of_the_allowed_connections_is_not_the_clients_lag() -> None:
    # Two connections; the third request waits for the first to end, the fifth for nobody.
    records = [
        answered(0, 0.0, [1.0]),
        answered(1, 0.1, [2.0]),
        answered(2, 0.2, [1.5], started_s=1.0),
        answered(3, 0.3, [2.0], started_s=1.5),
        answered(4, 3.0, [4.0], started_s=3.5),
    ]
    limited = msgspec.structs.replace(TARGET, max_connections=2)
    lag = summary_of(records, target=limited).full.client_lag_s
    assert lag is not None and (lag.num, lag.max) == (3, 0.5)
    free = summary_of(records).full.client_lag_s
    assert free is not None and free.num == 5 and free.max == pytest.approx(1.2)


def test_each_process_has_its_share_of_the_connections() -> None:
    records = [
        answered(0, 0.0, [1.0], process=0),
        answered(1, 0.1, [1.5], started_s=1.0, process=0),
        answered(2, 0.2, [1.5], started_s=0.7, process=1),
    ]
    lag = summary_of(records, target=msgspec.structs.replace(TARGET, max_connections=2)).full.client_lag_s
    assert lag is not None and lag.num == 2 and lag.max == pytest.approx(0.5), "the other process had one to spare"


def test_missing_and_doubled_records_make_the_run_invalid() -> None:
    records = steady_records(10)
    summary = summary_of([*records[:8], records[0]], plan=planned(10))
    assert summary.invalid_because == [
        "2 of 10 planned requests have no record",
        "1 requests have more than one record",
    ]
    assert "1 records are of requests that are not in the plan" in summary_of(records, plan=planned(9)).invalid_because


def test_a_run_without_an_answer_is_not_valid_and_not_an_error() -> None:
    assert not summary_of([failed(0, 0.0, 1.0)], "ttft:1s,e2e_p99:1s").is_valid
    assert not summary_of([Record(0, 0.0)]).is_valid
    assert not summary_of([]).is_valid


def test_settings_are_enough_to_repeat_a_run_and_may_lack_new_fields() -> None:
    client = Client(characters_per_token=3.3, num_warm_up=8, num_processes=2, sources=["127.0.0.2"])
    summary = summary_of(steady_records(3), client=client)
    reported = msgspec.to_builtins(summary.settings)
    assert {name: reported.pop(name) for name in msgspec.to_builtins(client)} == msgspec.to_builtins(client)
    old = msgspec.to_builtins(summary)
    old["settings"] = reported
    assert msgspec.convert(old, Summary).settings.characters_per_token is None


def test_the_version_is_the_commit_of_this_checkout_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("git") and (Path(experiment.__file__).parents[1] / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}(-dirty)?", experiment._version())
    monkeypatch.setattr(experiment, "__file__", str(tmp_path / "loadtest" / "experiment.py"))
    assert experiment._version() == ""
    (tmp_path / ".git").mkdir()
    assert experiment._version() == "", "that is no repository"


def test_a_summary_survives_json_and_holds_no_key() -> None:
    target = msgspec.structs.replace(TARGET, api_key="secret-key")
    environment = msgspec.structs.replace(ENVIRONMENT, command="loadtest run --api-key secret-key --title \udcff")
    records = [*steady_records(50), failed(50, 50.0, 51.0)]
    records[-1].error = "not text: \udcff"
    summary = summarise(
        planned(51), measure(records), target, environment, slo.parse("ttft:1s,e2e_max:1s"), notes=["interrupted"]
    )
    text = msgspec.json.encode(summary)
    assert b"secret" not in text
    assert msgspec.json.decode(text, type=Summary) == summary
    assert summary.schema_version == 1 and summary.notes[0] == "interrupted"


# -- over time --------------------------------------------------------------------------------------------------------


def closed_loop(num_clients: int = 20, num_rounds: int = 20) -> list[Record]:
    """Clients that begin one after the other, over 10 s, and ask again a millisecond after each answer."""
    records: list[Record] = []
    for client in range(num_clients):
        start_s = 10.0 * client / num_clients
        for _ in range(num_rounds):
            records.append(answered(len(records), start_s, [start_s + 1.0, start_s + 5.0]))
            start_s += 5.001
    return records


def test_the_steady_state_leaves_out_how_the_load_came_and_went() -> None:
    measured = measure(closed_loop())
    window = steady_window(measured, is_open=False)
    assert window is not None
    assert window[0] == pytest.approx(9.5, abs=1.5) and window[1] == pytest.approx(100.0, abs=1.5)
    summary = summary_of(measured.records, plan=planned(400, num_clients=20))
    assert summary.steady is not None
    assert summary.steady.in_flight_mean == pytest.approx(20.0, abs=0.3)
    assert summary.full.in_flight_mean < 19.0
    assert summary.steady.output_tokens_per_s == pytest.approx(20 * 2 / 5.001, rel=0.02)
    assert summary.steady.requests_per_s == pytest.approx(20 / 5.001, rel=0.03)


def queue(rate: float, num: int, num_seats: int, seed: int) -> Measurements:
    """Poisson arrivals at a server with so many seats, who take a second each on average."""
    generator = np.random.default_rng(seed)
    free = [0.0] * num_seats
    records = []
    for index, start_s in enumerate(np.cumsum(generator.exponential(1.0 / rate, num))):
        seat = min(range(num_seats), key=free.__getitem__)
        begun_s = max(float(start_s), free[seat])
        free[seat] = begun_s + float(generator.exponential())
        records.append(answered(index, float(start_s), [begun_s + 0.01, free[seat] + 0.01]))
    return measure(records)


def test_an_open_loop_is_steady_unless_the_server_falls_behind() -> None:
    for seed in range(5):
        fine = queue(rate=20.0, num=1200, num_seats=60, seed=seed)
        window = steady_window(fine, is_open=True)
        assert window is not None and window[1] - window[0] > 0.85 * 60.0
        overloaded = queue(rate=20.0, num=1200, num_seats=10, seed=seed)
        assert steady_window(overloaded, is_open=True) is None


def test_a_ramp_is_no_steady_state_and_the_last_of_some_steps_may_be() -> None:
    ramp = [
        answered(index, 60.0 * math.sqrt(index / 2400.0), [60.0 * math.sqrt(index / 2400.0) + 1.0])
        for index in range(2400)
    ]
    assert steady_window(measure(ramp), is_open=True) is None
    # Even where its last requests, while it drains, look as if they held still.
    level = closed_loop()
    assert summary_of(level).steady is not None
    assert summary_of(level, plan=planned(len(level), arrivals="ramp:1-2")).steady is None
    starts = np.concatenate([np.arange(0.0, 30.0, 0.05), np.arange(30.0, 60.0, 0.01)])
    window = steady_window(measure([answered(place, at, [at + 1.0]) for place, at in enumerate(starts)]), is_open=True)
    assert (
        window is not None and window[0] == pytest.approx(31.0, abs=1.5) and window[1] == pytest.approx(60.0, abs=1.5)
    )


def test_nothing_is_steady_where_nothing_ran() -> None:
    assert steady_window(measure([]), is_open=True) is None
    assert steady_window(measure([Record(0, 0.0)]), is_open=True) is None


def test_seconds_add_up_to_the_run() -> None:
    records = [*closed_loop(5, 4), failed(20, 3.5, 3.6), Record(21, 50.0)]
    series = timeline(measure(records), [(0.5, {"vllm:num_requests_running": 3.0}), (40.2, {})])
    assert len(series.t_s) == 41
    assert (sum(series.num_begun), sum(series.num_answered), sum(series.num_failed)) == (21, 20, 1)
    assert sum(series.output_tokens_per_s) == pytest.approx(40.0)
    assert sum(series.in_flight) == pytest.approx(20 * 5.0 + 0.1)
    assert (series.num_begun[3], series.num_failed[3]) == (1, 1)
    assert series.ttft_p50_s[0] == pytest.approx(1.0) and series.ttft_p50_s[1] is None
    assert series.server == {"vllm:num_requests_running": [3.0] + [None] * 40}


def test_percentiles_of_a_bin_are_by_intended_start() -> None:
    generator = np.random.default_rng(3)
    starts = np.sort(generator.uniform(0.0, 10.0, 500))
    ttft = generator.exponential(size=500)
    records = [answered(index, start, [start + ttft[index]]) for index, start in enumerate(starts)]
    series = timeline(measure(records))
    for second in range(10):
        chosen = ttft[(starts >= second) & (starts < second + 1)]
        assert series.ttft_p99_s[second] == pytest.approx(np.percentile(chosen, 99))


def test_timeline_csv_holds_the_timeline(tmp_path: Path) -> None:
    series = timeline(measure(closed_loop(2, 2)), [(1.5, {'a,"b': 1.0})])
    write_csv(series, tmp_path / "timeline.csv")
    with (tmp_path / "timeline.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["in_flight"]) for row in rows] == pytest.approx(series.in_flight)
    assert [row['a,"b'] for row in rows[:3]] == ["", "1.0", ""]


def test_servers_are_read_by_their_own_names_and_over_their_labels() -> None:
    engines = {
        'vllm:num_requests_running{engine="0"}': 3.0,
        'vllm:num_requests_running{engine="1"}': 4.0,
        'vllm:kv_cache_usage_perc{engine="0"}': 0.2,
        'vllm:kv_cache_usage_perc{engine="1"}': 0.4,
        "vllm:num_requests_running_other": 100.0,
    }
    series = server_series([(0.5, engines), (1.5, {})])
    assert {name: values.tolist() for name, (_, values) in series.items()} == {
        "batch_size": [7.0],
        "num_running": [7.0],
        "kv_cache_usage": [pytest.approx(0.3)],
    }
    own = server_series([(0.5, {"servekit_scheduler_batch_size": 2.0, "servekit_num_requests_running": 5.0})])
    assert own["batch_size"][1].tolist() == [2.0] and own["num_running"][1].tolist() == [5.0]


def test_a_counter_is_summarised_by_its_growth_across_restarts() -> None:
    scrapes = [(float(t), {"servekit_num_preemptions_total": value}) for t, value in enumerate([5.0, 7.0, 1.0, 4.0])]
    figure = summary_of(steady_records(4), scrapes=scrapes).server["num_preemptions"]
    assert figure.increase == 2.0 + 1.0 + 3.0


def test_the_hit_rate_counts_only_this_run() -> None:
    scrapes = [
        (float(t), {"vllm:prefix_cache_queries_total": queries, 'vllm:prefix_cache_hits_total{engine="0"}': hits})
        for t, (queries, hits) in enumerate([(5000.0, 0.0), (6000.0, 500.0), (7000.0, 1500.0)])
    ]
    summary = summary_of(steady_records(4), scrapes=scrapes)
    assert prefix_cache_hit_rate([summary]) == 0.75
    assert (
        headline(summary, summary.full)["prefix cache hits, as the server reports them"] == "75.00 % of prompt tokens"
    )
    silent = summary_of(steady_records(4), scrapes=scrapes[:1])
    assert prefix_cache_hit_rate([silent]) is None, "nothing was looked up between one scrape and itself"
    assert prefix_cache_hit_rate([silent, summary]) == 0.75
    assert not [name for name in headline(silent, silent.full) if name.startswith("prefix")]


def test_the_table_shows_verified_and_wrong_answers() -> None:
    verifying = msgspec.structs.replace(TARGET, verifies=True)
    right = summary_of(steady_records(3), target=verifying)
    assert headline(right, right.full)["answers verified"] == "3 of 3"
    records = [*steady_records(3), failed(3, 3.0, 4.0, Outcome.WRONG), failed(4, 4.0, 5.0)]
    mixed = summary_of(records, target=verifying)
    assert headline(mixed, mixed.full)["answers verified"] == "3 of 4: 1 WRONG"
    plain = summary_of(records)
    assert "answers verified" not in headline(plain, plain.full)


def test_the_lag_that_a_search_allows_grows_with_the_tightest_limit() -> None:
    figures = summary_of([answered(0, 0.0, [0.01 + 0.01 * place for place in range(10)])]).full
    assert lag_limit_for_s(slo.parse("ttft:500ms,tpot:80ms"), figures) == pytest.approx(0.025)
    assert lag_limit_for_s(slo.parse("ttft:500ms,tpot:50ms"), figures) == pytest.approx(0.05 * 0.05 * 9)
    assert lag_limit_for_s(slo.parse("ttft:500ms,itl:100ms"), figures) == pytest.approx(0.005)
    assert lag_limit_for_s(slo.parse("ttft:1ms"), figures) == pytest.approx(0.002), "what a run allows in any case"
