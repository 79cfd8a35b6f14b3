"""Claims about replays with other settings, against services in virtual time that really had these settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.observability.journal import Journal
from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.replaying.changed_run import ChangedRun
from servekit.replaying.command import ReplayOptions, change_settings, read_run
from servekit.replaying.recorded_run import ModelledSteps, RecordedRun
from servekit.replaying.run_record import Figures, RunRecord
from servekit.scheduler.commands import AddSequence, Commit, Plan
from servekit.scheduler.scheduler_config import SchedulerConfig
from tests.servekit.replaying.services import CONFIG, MODEL, requests, serve


def recorded(path: Path, config: SchedulerConfig = CONFIG) -> RecordedRun:
    return read_run(path, config)


def replayed(run: RecordedRun, config: SchedulerConfig = CONFIG) -> RunRecord:
    times = run.step_times()
    assert times is not None
    return ChangedRun(run, config, times).play()


def assert_same(one: RunRecord, other: RunRecord, tolerance_s: float = 1e-6) -> None:
    """Check that two runs have the same times for every request, and the same figures."""
    assert one.requests.keys() == other.requests.keys()
    for sequence_id, expected in one.requests.items():
        found = other.requests[sequence_id]
        where = f"request {sequence_id}: {found}, expected {expected}"
        assert (found.num_tokens, found.ended_by) == (expected.num_tokens, expected.ended_by), where
        for name in ("started_s", "first_token_s", "last_token_s"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=tolerance_s), where
    for name in Figures.__struct_fields__:
        # Between two plans, a journal dates nothing exactly.
        assert getattr(other.figures(), name) == pytest.approx(getattr(one.figures(), name), rel=1e-4), name


def test_the_same_settings_repeat_what_happened(tmp_path: Path) -> None:
    config = replace(CONFIG, num_blocks=45)
    serve(tmp_path / "journal", config, requests(200, 40.0))
    run = recorded(tmp_path / "journal", config)
    figures = run.record.figures()
    assert figures.num_preemptions > 0 and figures.cached_prompt_share > 0.01 and figures.mean_waiting > 10.0
    assert_same(run.record, replayed(run, config))


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduling_policy": "shortest"},
        {"scheduling_policy": "fair"},
        {"scheduling_policy": "priority"},
        {"num_blocks": 40},
        {"num_blocks": 200},
        {"max_num_seqs": 4},
        {"max_num_seqs": 16, "num_blocks": 200},
        {"max_num_batched_tokens": 32},
        {"max_steps_in_flight": 1},
        {"enable_prefix_caching": False},
        {"block_size": 32, "num_blocks": 35},
    ],
    ids=str,
)
def test_other_settings_give_what_a_service_with_these_settings_gives(tmp_path: Path, changes: dict[str, Any]) -> None:
    arrivals, config = requests(120, 24.0), replace(CONFIG, **changes)
    serve(tmp_path / "journal", CONFIG, arrivals)
    serve(tmp_path / "truth", config, arrivals)
    run, truth = recorded(tmp_path / "journal"), recorded(tmp_path / "truth", config).record
    found = replayed(run, config)
    assert_same(truth, found)
    before = run.record.figures()
    assert found.figures().ttft_p99_s != pytest.approx(before.ttft_p99_s, rel=1e-3), "the change has an effect"


def test_steps_that_were_held_up_are_held_up_again(tmp_path: Path) -> None:
    rng = random.Random(3)

    def noisy(plan: StepPlan) -> float:
        return MODEL.duration_s(plan) * rng.lognormvariate(0.0, 0.2) + (0.3 if rng.random() < 0.01 else 0.0)

    serve(tmp_path / "journal", CONFIG, requests(100, 10.0), noisy)
    run = recorded(tmp_path / "journal")
    assert_same(run.record, replayed(run))


def test_clients_that_leave_deadlines_and_a_lost_worker_are_repeated(tmp_path: Path) -> None:
    arrivals = requests(150, 30.0)
    arrivals = [
        replace(each, leaves_s=each.at_s + 0.4) if number % 5 == 0 else each for number, each in enumerate(arrivals)
    ]
    arrivals = [
        replace(each, deadline_s=each.at_s + 0.7) if number % 5 == 1 else each for number, each in enumerate(arrivals)
    ]
    serve(tmp_path / "journal", CONFIG, arrivals, outage_s=1003.0)
    run = recorded(tmp_path / "journal")
    ended = run.record.num_ended_by()
    assert ended["abort"] >= 5 and ended["deadline"] >= 2 and len(run.outages) == 1
    assert run.outages[0].ready_s - run.outages[0].at_s == pytest.approx(0.5, abs=0.02)
    found = replayed(run)
    assert found.num_ended_by() == ended
    # What ends between two steps is dated with the first one, so a slot may become free a step earlier.
    for name in ("ttft_p50_s", "itl_p50_s", "tokens_per_s", "num_output_tokens"):
        assert getattr(found.figures(), name) == pytest.approx(getattr(run.record.figures(), name), rel=0.02), name


def test_requests_that_never_fit_are_counted(tmp_path: Path) -> None:
    serve(tmp_path / "journal", CONFIG, requests(40, 14.0))
    run = recorded(tmp_path / "journal")
    config, _ = change_settings(CONFIG, ReplayOptions(file=tmp_path, num_kv_blocks=12))
    found = replayed(run, config)
    assert found.num_refused > 5 and found.num_refused + len(found.requests) == 40


def test_step_times_of_another_device_replace_the_fitted_ones(tmp_path: Path) -> None:
    serve(tmp_path / "journal", CONFIG, requests(60, 14.0))
    run = recorded(tmp_path / "journal")
    faster = replace(MODEL, **{name: getattr(MODEL, name) / 2 for name in ("step_s", "prefill_s", "decode_s")})
    found = ChangedRun(run, CONFIG, ModelledSteps(faster)).play().figures()
    assert found.itl_p50_s < 0.7 * run.record.figures().itl_p50_s


def test_a_file_that_begins_with_a_checkpoint_is_replayed_from_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, 2**40, 2)
    journal.open()
    manager = journal.make_manager(CONFIG)
    for number in range(12):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        prompt = tuple(range(100, 160))
        manager.apply(AddSequence(sequence_id=number, prompt_token_ids=prompt, sampling=sampling, arrival_s=5.0))
    now_s = 5.0
    while manager.has_work:
        plan = manager.apply(Plan(now_s))
        assert plan is not None
        now_s += MODEL.duration_s(plan)
        if plan.step_id == 10:
            journal.is_checkpoint_overdue = True
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        manager.apply(Commit(StepResult(plan.epoch, plan.step_id, (8,) * num_sampled, 0.0), now_s))
    journal.close()
    assert path.with_name("journal.1").exists()
    run = recorded(path)
    found = replayed(run).figures()
    assert found.num_requests == 12 and found.num_output_tokens == run.record.figures().num_output_tokens
    assert found.duration_s == pytest.approx(run.record.figures().duration_s, rel=0.1), "the KV is computed again"
