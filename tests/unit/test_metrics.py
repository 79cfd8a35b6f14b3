"""Claims about what is measured, and that it stays bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from servekit.config import ServeConfig
from servekit.live_view import LiveStep
from servekit.messages import StepResult
from servekit.metrics import RESTART_CAUSES, Metrics, Snapshot
from servekit.sampling_params import SamplingParams
from servekit.sequence import FinishReason, Sequence


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Each sample by its name and its labels' values, without the model's name and `servekit_`."""
    told = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            told[sample.name.removeprefix("servekit_"), *labels] = sample.value
    return told


def make_metrics(**settings: Any) -> Metrics:
    return Metrics(ServeConfig(**settings), "1.2.3")


def make_sequence(prompt_length: int = 5, num_output: int = 0, arrival_s: float = 10.0) -> Sequence:
    sequence = Sequence(0, [1] * prompt_length, SamplingParams(max_tokens=8), arrival_s)
    sequence.token_ids += [2] * num_output
    return sequence


def make_step(step_id: int, sent_s: float, num_prefill_tokens: int = 0, num_decode_tokens: int = 1) -> LiveStep:
    return LiveStep(step_id, sent_s, num_prefill_tokens, num_decode_tokens, num_sequences=4, duration_s=None)


def test_a_sequences_times_add_up() -> None:
    metrics, sequence = make_metrics(), make_sequence(num_output=5)
    metrics.admitted(sequence)
    metrics.first_token(3.0)
    for _ in range(4):
        metrics.next_token(0.5)
    sequence.first_scheduled_s = 11.0
    metrics.ended(sequence, FinishReason.STOP, 16.0, first_token_s=13.0, last_token_s=15.0)
    told = samples(metrics)
    assert told["request_queue_time_seconds_sum",] == 1.0
    assert told["request_prefill_time_seconds_sum",] == 2.0
    assert told["request_decode_time_seconds_sum",] == 2.0
    assert told["e2e_request_latency_seconds_sum",] == 6.0
    assert told["time_to_first_token_seconds_sum",] == 3.0
    assert told["inter_token_latency_seconds_sum",] == 2.0
    assert told["request_time_per_output_token_seconds_sum",] == 0.5
    assert told["prompt_tokens_total",] == told["generation_tokens_total",] == 5
    assert told["request_success_total", "stop"] == 1


def test_one_token_has_no_time_between_tokens_and_no_token_no_prefill() -> None:
    metrics = make_metrics()
    metrics.ended(make_sequence(num_output=1), FinishReason.LENGTH, 12.0, first_token_s=12.0, last_token_s=12.0)
    metrics.ended(make_sequence(), FinishReason.ABORT, 14.0)
    told = samples(metrics)
    assert told["request_time_per_output_token_seconds_count",] == 0
    assert told["request_prefill_time_seconds_count",] == 1
    # Who never had a seat waited all its life.
    assert told["request_queue_time_seconds_count",] == 2
    assert told["request_queue_time_seconds_sum",] == 2.0 + 4.0


def test_a_fork_does_not_count_its_prompt_again() -> None:
    metrics, leader = make_metrics(), make_sequence(7)
    metrics.admitted(leader)
    metrics.admitted(Sequence(1, leader.token_ids, leader.sampling, leader=leader))
    assert samples(metrics)["prompt_tokens_total",] == 7
    assert samples(metrics)["request_prompt_tokens_count",] == 2


def test_the_batch_is_told_by_phase_and_forgotten_when_there_is_nothing_to_do() -> None:
    metrics = make_metrics()
    metrics.step_sent(make_step(0, 1.0, num_prefill_tokens=7, num_decode_tokens=2), 0, is_alone=False)
    told = samples(metrics)
    assert told["scheduler_batch_size",] == 4
    assert told["scheduler_batch_tokens", "decode"] == 2
    assert told["scheduler_batch_tokens", "prefill"] == 7
    metrics.idle_began(2.0)
    told = samples(metrics)
    assert told["scheduler_batch_size",] == told["scheduler_batch_tokens", "decode"] == 0


def test_a_round_trip_is_measured_where_nothing_else_was_in_flight() -> None:
    metrics = make_metrics()
    metrics.step_sent(make_step(0, 10.0), 0, is_alone=True)
    metrics.step_sent(make_step(1, 10.5), 0, is_alone=False)
    metrics.step_done(StepResult(0, 0, (1,), 0.75), 11.0, turn_s=1.5)
    metrics.step_done(StepResult(0, 1, (1,), 0.75), 12.0, turn_s=0.5)
    told = samples(metrics)
    assert told["ipc_roundtrip_seconds_count",] == 1
    assert told["ipc_roundtrip_seconds_sum",] == 0.25
    assert told["step_overhead_seconds_sum",] == 0.75
    assert told["scheduler_steps_total",] == 2


def test_a_round_trip_that_a_worker_took_to_its_grave_is_not_measured() -> None:
    metrics = make_metrics()
    metrics.step_sent(make_step(0, 10.0), 0, is_alone=True)
    metrics.step_done(StepResult(1, 0, (1,), 0.5), 99.0, turn_s=1.0)  # its successor's
    assert samples(metrics)["ipc_roundtrip_seconds_count",] == 0


def test_idle_time_counts_while_it_lasts() -> None:
    metrics, now = make_metrics(), 0.0
    metrics.watch(
        lambda: Snapshot(
            now_s=now,
            num_running=1,
            num_waiting=3,
            num_deferred=1,
            num_waiting_tokens=40,
            num_preemptions=0,
            num_stale_results=0,
            num_blocks=4,
            num_free_blocks=3,
            num_prompt_tokens=9,
            num_cached_tokens=8,
            prefill_limit=16,
        )
    )
    metrics.idle_began(10.0)
    now = 12.0
    told = samples(metrics)
    assert told["scheduler_idle_seconds_total",] == 2.0
    metrics.idle_ended(13.0)
    now = 50.0
    assert samples(metrics)["scheduler_idle_seconds_total",] == 3.0
    assert told["num_requests_waiting_by_reason", "capacity"] == 2
    assert told["num_requests_waiting_by_reason", "deferred"] == 1
    assert told["prompt_tokens_cached_total",] == told["prefix_cache_hits_total",] == 8
    assert told["kv_cache_usage_perc",] == 0.25
    assert told["num_tokens_waiting",] == 40


@pytest.mark.parametrize("cause", [*RESTART_CAUSES, "moonlight"])
def test_a_worker_is_replaced_for_a_known_cause_or_another(cause: str) -> None:
    metrics = make_metrics()
    metrics.worker_restarted(cause)
    told = samples(metrics)
    assert told["worker_restarts_total", cause if cause in RESTART_CAUSES else "other"] == 1
    assert sum(value for name, value in told.items() if name[0] == "worker_restarts_total") == 1


def test_no_number_of_error_codes_makes_more_series_than_a_hundred() -> None:
    metrics, chance = make_metrics(), random.Random(0)
    for _ in range(1000):
        metrics.refused(f"code {chance.random()}")
    refused = {name: value for name, value in samples(metrics).items() if name[0] == "admission_rejections_total"}
    assert len(refused) == 101
    assert refused["admission_rejections_total", "other"] == 900


def test_a_drain_that_begins_in_the_midst_of_a_scrape_is_told() -> None:
    """A signal's handler runs between any two instructions, also where a lock is held that it would wait for."""
    metrics = make_metrics()
    assert samples(metrics)["draining",] == 0
    metrics.is_draining = True
    assert samples(metrics)["draining",] == 1


def test_secrets_are_in_no_label() -> None:
    metrics = make_metrics(api_key="hunter2", max_num_seqs=17)
    metrics.http_request("/generate", "POST", 200)
    assert b"hunter2" not in metrics.render()
    assert b'max_num_seqs="17"' in metrics.render()
