"""Tests of the metrics: their values after events, and the bounds on their labels."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from servekit.config import ServeConfig
from servekit.observability.cost import Cost
from servekit.observability.metrics import (
    JOIN_REFUSALS,
    RESTART_CAUSES,
    AdapterUsage,
    LoadMetrics,
    Metrics,
    ModelMetrics,
    PredictorStats,
    QueueUsage,
    RemoteStats,
    SchedulerStats,
    SeveralModelsMetrics,
)
from servekit.observability.observer import StepSummary
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import StepResult, TransferReport
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.sequence import FinishReason, Sequence


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """The value of each sample, by its name without `servekit_` and its label values.

    Without the model's name and the replica.
    """
    values = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "replica")]
            values[sample.name.removeprefix("servekit_"), *labels] = sample.value
    return values


def make_metrics(**settings: Any) -> Metrics:
    return Metrics(ServeConfig(**settings), "1.2.3")


def make_sequence(prompt_length: int = 5, num_output: int = 0, arrival_s: float = 10.0) -> Sequence:
    sequence = Sequence(0, [1] * prompt_length, SamplingParams(max_tokens=8), arrival_s)
    sequence.token_ids.extend([2] * num_output)
    return sequence


def make_step(step_id: int, num_prefill_tokens: int = 0, num_decode_tokens: int = 1) -> StepSummary:
    return StepSummary(0, step_id, num_prefill_tokens, num_decode_tokens, num_sequences=4)


def test_queue_prefill_and_decode_time_add_up_to_the_latency_of_the_sequence() -> None:
    metrics, sequence = make_metrics(), make_sequence(num_output=5)
    metrics.requests.sequence_admitted(sequence)
    metrics.requests.tokens_delivered([3.0], [], 13.0)
    metrics.requests.tokens_delivered([], [0.5, 0.5], 14.0)
    metrics.requests.tokens_delivered([], [0.5, 0.5], 15.0)
    sequence.first_scheduled_s = 11.0
    metrics.requests.sequence_ended(sequence, FinishReason.STOP, 5, 13.0, 15.0, 16.0)
    values = samples(metrics)
    assert values["request_queue_time_seconds_sum",] == 1.0
    assert values["request_prefill_time_seconds_sum",] == 2.0
    assert values["request_decode_time_seconds_sum",] == 2.0
    assert values["e2e_request_latency_seconds_sum",] == 6.0
    assert values["time_to_first_token_seconds_sum",] == 3.0
    assert values["inter_token_latency_seconds_sum",] == 2.0
    assert values["request_time_per_output_token_seconds_sum",] == 0.5
    assert values["prompt_tokens_total",] == values["generation_tokens_total",] == 5
    assert values["request_success_total", "stop"] == 1


def test_one_token_gives_no_time_per_output_token_and_no_token_gives_no_prefill_time() -> None:
    metrics = make_metrics()
    metrics.requests.sequence_ended(make_sequence(), FinishReason.LENGTH, 1, 12.0, 12.0, 12.0)
    metrics.requests.sequence_ended(make_sequence(), FinishReason.ABORT, 0, None, None, 14.0)
    values = samples(metrics)
    assert values["request_time_per_output_token_seconds_count",] == 0
    assert values["request_prefill_time_seconds_count",] == 1
    # A sequence that never ran was queued for all its life.
    assert values["request_queue_time_seconds_count",] == 2
    assert values["request_queue_time_seconds_sum",] == 2.0 + 4.0


def test_a_fork_does_not_count_its_prompt_again() -> None:
    metrics, leader = make_metrics(), make_sequence(7)
    metrics.requests.sequence_admitted(leader)
    metrics.requests.sequence_admitted(Sequence(1, leader.token_ids, leader.sampling, leader=leader))
    assert samples(metrics)["prompt_tokens_total",] == 7
    assert samples(metrics)["request_prompt_tokens_count",] == 2


def test_batch_gauges_show_the_newest_step_by_phase_and_zero_when_idle() -> None:
    metrics = make_metrics()
    metrics.steps.step_sent(make_step(0, num_prefill_tokens=7, num_decode_tokens=2), is_alone=False, now_s=1.0)
    values = samples(metrics)
    assert values["scheduler_batch_size",] == 4
    assert values["scheduler_batch_tokens", "decode"] == 2
    assert values["scheduler_batch_tokens", "prefill"] == 7
    metrics.steps.idle_began(2.0)
    values = samples(metrics)
    assert values["scheduler_batch_size",] == values["scheduler_batch_tokens", "decode"] == 0


def test_round_trip_is_measured_only_for_steps_sent_alone() -> None:
    metrics = make_metrics()
    metrics.steps.step_sent(make_step(0), is_alone=True, now_s=10.0)
    metrics.steps.step_sent(make_step(1), is_alone=False, now_s=10.5)
    metrics.steps.step_done(StepResult(0, 0, (1,), 0.75), 1, loop_time_s=1.5, now_s=11.0)
    metrics.steps.step_done(StepResult(0, 1, (1,), 0.75), 1, loop_time_s=0.5, now_s=12.0)
    values = samples(metrics)
    assert values["ipc_roundtrip_seconds_count",] == 1
    assert values["ipc_roundtrip_seconds_sum",] == 0.25
    assert values["step_overhead_seconds_sum",] == 0.75
    assert values["scheduler_steps_total",] == 2


def test_round_trip_of_a_step_of_a_lost_worker_is_not_measured() -> None:
    metrics = make_metrics()
    metrics.steps.step_sent(make_step(0), is_alone=True, now_s=10.0)
    result_of_next_worker = StepResult(1, 0, (1,), 0.5)
    metrics.steps.step_done(result_of_next_worker, 1, loop_time_s=1.0, now_s=99.0)
    assert samples(metrics)["ipc_roundtrip_seconds_count",] == 0


def test_dropped_log_lines_are_read_at_each_scrape() -> None:
    metrics, num_dropped = make_metrics(), 0
    metrics.watch_log(lambda: num_dropped)
    assert samples(metrics)["log_lines_dropped_total",] == 0
    num_dropped = 7
    assert samples(metrics)["log_lines_dropped_total",] == 7


def test_idle_time_includes_the_current_idle_period() -> None:
    metrics, now = make_metrics(), 0.0
    metrics.watch_scheduler(
        lambda: [
            SchedulerStats(
                now_s=now,
                num_running=1,
                num_waiting=3,
                num_followers=1,
                num_waiting_tokens=40,
                num_preemptions=0,
                num_share_preemptions=0,
                num_stale_results=0,
                num_deferrals=5,
                num_blocks=4,
                num_free_blocks=3,
                num_prompt_tokens=9,
                num_cached_tokens=8,
                prefill_limit=16,
                step_token_limit=512,
                num_quarantined=2,
                predicted_wait_s=1.5,
                step_time_error=0.25,
                num_predicted_first_tokens=10,
                num_first_tokens_in_band=8,
                first_token_error=0.05,
                end_error=0.1,
            )
        ]
    )
    metrics.steps.idle_began(10.0)
    now = 12.0
    values = samples(metrics)
    assert values["scheduler_idle_seconds_total",] == 2.0
    metrics.steps.idle_ended(13.0)
    now = 50.0
    assert samples(metrics)["scheduler_idle_seconds_total",] == 3.0
    assert values["num_requests_waiting_by_reason", "capacity"] == 2
    assert values["num_requests_waiting_by_reason", "deferred"] == 1
    assert values["predicted_wait_seconds",] == 1.5 and values["step_time_error_ratio",] == 0.25
    assert values["predicted_first_tokens_total",] == 10 and values["predicted_first_tokens_in_band_total",] == 8
    assert values["first_token_prediction_error_ratio",] == 0.05 and values["end_prediction_error_ratio",] == 0.1
    assert values["prompt_tokens_cached_total",] == values["prefix_cache_hits_total",] == 8
    assert values["kv_cache_usage_perc",] == 0.25
    assert values["num_tokens_waiting",] == 40
    assert values["deferred_tokens_total",] == 5


@pytest.mark.parametrize("cause", [*RESTART_CAUSES, "unheard_of"])
def test_unknown_restart_causes_count_as_other(cause: str) -> None:
    metrics = make_metrics()
    metrics.workers.worker_lost(cause)
    values = samples(metrics)
    assert values["worker_restarts_total", cause if cause in RESTART_CAUSES else "other"] == 1
    assert sum(value for name, value in values.items() if name[0] == "worker_restarts_total") == 1


def test_refused_joins_are_counted_by_reason_and_each_reason_is_exported_before_it_happens() -> None:
    metrics = make_metrics()
    metrics.joins.refused("wrong_key")
    values = samples(metrics)
    assert [values["worker_joins_refused_total", reason] for reason in JOIN_REFUSALS] == [1.0] + [0.0] * 11


def test_workers_alive_and_restarts_follow_a_loss_a_failed_start_and_a_recovery() -> None:
    metrics = make_metrics()
    metrics.workers.worker_ready(None, 0.0)
    assert samples(metrics)["workers_alive",] == 1
    metrics.workers.worker_lost("ended")
    metrics.workers.worker_start_failed()
    assert samples(metrics)["workers_alive",] == 0
    metrics.workers.worker_ready(3.5, 9.0)
    values = samples(metrics)
    assert values["workers_alive",] == 1
    assert values["worker_restarts_total", "ended"] == values["worker_restarts_total", "no_start"] == 1
    assert values["worker_recovery_seconds_count",] == 1 and values["worker_recovery_seconds_sum",] == 3.5


def test_any_number_of_error_codes_makes_at_most_101_series() -> None:
    metrics, chance = make_metrics(), random.Random(0)
    for _ in range(1000):
        metrics.http.request_refused(f"code {chance.random()}")
    refused = {name: value for name, value in samples(metrics).items() if name[0] == "admission_rejections_total"}
    assert len(refused) == 101
    assert refused["admission_rejections_total", "other"] == 900


def test_draining_is_exported_from_a_plain_field() -> None:
    """A signal handler sets it. The handler may interrupt a scrape that holds a lock, so it must not take any."""
    metrics = make_metrics()
    assert samples(metrics)["draining",] == 0
    metrics.engine.is_draining = True
    assert samples(metrics)["draining",] == 1


def test_labels_contain_settings_but_no_secrets() -> None:
    metrics = make_metrics(api_key="hunter2", max_num_seqs=17)
    metrics.http.request_ended("/generate", "POST", 200)
    assert b"hunter2" not in metrics.render()
    assert b'max_num_seqs="17"' in metrics.render()


def test_request_success_total_counts_failures_and_its_help_says_so() -> None:
    metrics = make_metrics()
    metrics.requests.sequence_ended(make_sequence(), FinishReason.DEADLINE, 0, None, None, 14.0)
    assert samples(metrics)["request_success_total", "deadline"] == 1
    text = metrics.render().decode()
    assert re.search("HELP servekit_request_success_total .*abort, deadline and error", text)


def test_each_group_of_the_engines_events_is_updated_and_our_own_errors_are_counted() -> None:
    metrics = make_metrics()
    for observer in metrics.of_replica(0):
        observer.accounting_error()
    assert metrics.of_replica(0) == (metrics.steps, metrics.workers)
    assert samples(metrics)["accounting_faults_total",] == 1


def test_usage_of_the_queue_is_read_at_each_scrape() -> None:
    metrics, used = make_metrics(), [QueueUsage(0.25, 0.5), QueueUsage(1.0, 0.0)]
    metrics.watch_queue(used.pop)
    for sequences, tokens in ((1.0, 0.0), (0.25, 0.5)):
        values = samples(metrics)
        assert (values["queue_usage_perc", "sequences"], values["queue_usage_perc", "tokens"]) == (sequences, tokens)


def test_each_replica_has_its_own_values_of_the_same_metrics() -> None:
    metrics = make_metrics()
    stats = SchedulerStats(**dict.fromkeys(SchedulerStats.__struct_fields__, 1))
    metrics.watch_scheduler(lambda: [stats, replace(stats, num_running=5)])
    metrics.of_replica(1)[1].worker_lost("ended")
    values = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("cause", "ended") == "ended" and "replica" in sample.labels
    }
    assert values["servekit_num_requests_running", "0"] == 1 and values["servekit_num_requests_running", "1"] == 5
    assert values["servekit_worker_restarts_total", "0"] == 0 and values["servekit_worker_restarts_total", "1"] == 1


def test_drafts_are_counted_by_position_drafter_and_replica() -> None:
    metrics, counts = make_metrics(), [DraftLengths(2), DraftLengths(2)]
    for num_accepted in (0, 1, 2):
        counts[0].record(make_sequence(), 2, 2, num_accepted)
    metrics.watch_drafts("ngram", lambda: counts)
    values = samples(metrics)
    assert {key[1] for key in values if key[0].startswith("spec_decode")} == {"ngram"}
    families = list(text_string_to_metric_families(metrics.render().decode()))
    of_first = {
        (sample.name.removeprefix("servekit_spec_decode_num_"), sample.labels.get("position")): sample.value
        for family in families
        for sample in family.samples
        if "spec_decode" in sample.name and sample.labels["replica"] == "0"
    }
    assert of_first == {
        ("drafts_total", None): 3,
        ("draft_tokens_total", None): 6,
        ("accepted_tokens_total", None): 3,
        ("draft_tokens_per_pos_total", "0"): 3,
        ("draft_tokens_per_pos_total", "1"): 3,
        ("accepted_tokens_per_pos_total", "0"): 2,
        ("accepted_tokens_per_pos_total", "1"): 1,
    }


def test_scrape_of_several_models_has_each_family_once_and_counts_outlive_an_engine() -> None:
    models = [ModelMetrics(ServeConfig(served_model_name=name)) for name in "ab"]
    states = {"a": "ready", "b": "cold"}
    loads = [
        LoadMetrics(each, partial(states.__getitem__, name), lambda: 3, lambda: 500)
        for each, name in zip(models, "ab", strict=True)
    ]
    metrics = SeveralModelsMetrics("1.2.3", lambda: models)
    metrics.watch_log(lambda: 5)
    metrics.http.request_refused("model_not_found")
    stats = SchedulerStats(**dict.fromkeys(SchedulerStats.__struct_fields__, 1))
    models[0].watch_scheduler(lambda: [stats])
    loads[0].loaded(2.0)
    loads[0].unloaded()
    loads[1].load_failed()
    loads[1].refused()
    loads[1].waited("cold", 1.5)
    loads[1].mirrored("answered")
    loads[1].mirrored("dropped")
    loads[1].mirrored("dropped")
    lines = metrics.render().decode().splitlines()
    assert len([line for line in lines if line.startswith("# TYPE servekit_model_state ")]) == 1
    for line in (
        'servekit_model_state{model_name="a",state="ready"} 1.0',
        'servekit_model_state{model_name="b",state="ready"} 0.0',
        'servekit_model_uses{model_name="b"} 3.0',
        'servekit_model_memory_bytes{model_name="b"} 500.0',
        'servekit_model_loads_total{model_name="a",result="loaded"} 1.0',
        'servekit_model_loads_total{model_name="b",result="failed"} 1.0',
        'servekit_model_unloads_total{model_name="a"} 1.0',
        'servekit_model_load_refusals_total{model_name="b"} 1.0',
        'servekit_model_wait_seconds_sum{model_name="b",start="cold"} 1.5',
        'servekit_model_load_seconds_sum{model_name="a"} 2.0',
        'servekit_mirrored_requests_total{model_name="b",result="answered"} 1.0',
        'servekit_mirrored_requests_total{model_name="b",result="failed"} 0.0',
        'servekit_mirrored_requests_total{model_name="b",result="dropped"} 2.0',
        'servekit_admission_rejections_total{model_name="",reason="model_not_found"} 1.0',
        'servekit_log_lines_dropped_total{model_name=""} 5.0',
        'servekit_build_info{version="1.2.3"} 1.0',
        'servekit_num_requests_running{model_name="a",replica="0"} 1.0',
    ):
        assert line in lines, line
    models[0].forget_engine()
    text = metrics.render().decode()
    assert "servekit_num_requests_running" not in text
    assert 'servekit_model_loads_total{model_name="a",result="loaded"} 1.0' in text


def test_a_remote_model_counts_requests_by_result_and_shows_its_breaker() -> None:
    metrics = make_metrics()
    assert not any("remote" in name for name, *_ in samples(metrics)), "a local model has no such metrics"
    remote = metrics.remote
    remote.request_ended("answered")
    remote.request_ended("busy")
    remote.answer_began(0.25)
    remote.retried()
    remote.retry_refused()
    remote.rejected()
    remote.breaker_opened()
    metrics.requests.tokens_reported(3)
    metrics.watch_remote(lambda: RemoteStats("open", 2, 5))
    found = samples(metrics)
    assert found["remote_requests_total", "answered"] == found["remote_requests_total", "busy"] == 1
    assert found["remote_requests_total", "timeout"] == 0 and found["remote_answer_start_seconds_sum",] == 0.25
    names = ("retries", "retry_budget_exhausted", "breaker_rejections", "breaker_opened")
    assert [found[f"remote_{name}_total",] for name in names] == [1, 1, 1, 1]
    assert found["remote_breaker_state", "open"] == 1 and found["remote_breaker_state", "closed"] == 0
    assert found["remote_num_connections",] == 2 and found["remote_num_waiting",] == 5
    assert found["generation_tokens_total",] == 3


def test_a_predictor_counts_inputs_by_outcome_and_batches_by_size() -> None:
    metrics = make_metrics()
    assert not any("prediction" in name for name, *_ in samples(metrics)), "a language model has no such metrics"
    predictions = metrics.predictions
    predictions.admitted(3, 50)
    predictions.batch_sent(2, [0.5, 1.5])
    predictions.batch_done(0.25, 64)
    predictions.ended("computed", 2.0)
    predictions.ended("expired", 1.0)
    stats = PredictorStats(num_waiting=1, num_waiting_tokens=16, num_in_flight=2, num_suspects=3, num_stale_results=4)
    metrics.watch_predictor(lambda: stats)
    found = samples(metrics)
    assert found["prediction_items_admitted_total",] == 3 and found["prediction_tokens_total",] == 50
    assert found["prediction_items_total", "computed"] == found["prediction_items_total", "expired"] == 1
    assert found["prediction_items_total", "failed"] == 0
    assert found["prediction_batch_items_sum",] == 2 and found["prediction_queue_time_seconds_sum",] == 2.0
    assert found["prediction_computed_tokens_total",] == 64 and found["prediction_latency_seconds_sum",] == 3.0
    assert found["prediction_batch_duration_seconds_sum",] == 0.25
    assert found["prediction_items_waiting",] == 1 and found["prediction_tokens_waiting",] == 16
    assert found["prediction_batches_in_flight",] == 2 and found["prediction_items_suspected",] == 3
    assert found["prediction_stale_results_total",] == 4


def test_the_cost_of_tokens_is_missing_while_there_are_none() -> None:
    metrics = make_metrics(price_per_hour=2.5)
    costs = [Cost(5.0, 1.25, None), Cost(5.0, 2.5, 0.75)]
    metrics.watch_cost(lambda: costs.pop(0))
    found = samples(metrics)
    assert found["cost_total",] == 1.25 and found["cost_per_hour",] == 5.0
    assert ("cost_per_million_tokens",) not in found
    assert samples(metrics)["cost_per_million_tokens",] == 0.75


def test_tokens_that_cost_are_those_of_prompts_and_answers() -> None:
    metrics = make_metrics()
    metrics.requests.sequence_admitted(make_sequence(prompt_length=5))
    metrics.requests.tokens_delivered([1.0], [0.1, 0.1], 3.0)
    metrics.requests.tokens_reported(4)  # of a remote model
    assert metrics.requests.num_tokens == 5 + 3 + 4


def test_endpoint_pickers_find_one_sample_for_all_replicas() -> None:
    metrics = make_metrics()
    first = SchedulerStats(**{**dict.fromkeys(SchedulerStats.__struct_fields__, 0), "num_waiting": 3, "num_running": 2,
                              "num_blocks": 100, "num_free_blocks": 40})  # fmt: skip
    second = replace(first, num_waiting=1, num_running=5, num_free_blocks=100)
    metrics.watch_scheduler(lambda: [first, second])
    values = samples(metrics)
    assert values["total_queued_requests",] == 4 and values["total_running_requests",] == 7
    assert values["kv_cache_utilization",] == pytest.approx(0.3)
    assert values["cache_config_info", str(ServeConfig().block_size), "200"] == 1


def test_adapters_are_counted_by_name_and_the_labels_are_bounded() -> None:
    metrics = make_metrics()
    assert not any(name.startswith("lora") for name, *_ in samples(metrics)), "a server without adapters has none of it"
    for number in range(150):
        sequence = make_sequence(prompt_length=5)
        sequence.adapter = LoraAdapter(number, "/path", name=f"adapter {number}")
        metrics.adapters.sequence_ended(sequence, FinishReason.LENGTH, 3, 13.0, 15.0, 16.0)
    metrics.adapters.sequence_ended(make_sequence(), FinishReason.LENGTH, 3, 13.0, 15.0, 16.0)  # of the model itself
    metrics.adapters.step_done(StepResult(0, 0, (), 0.1, num_adapter_reads=3, num_adapter_evictions=2), 0, 0.1, 16.0)
    metrics.watch_adapters(lambda: AdapterUsage(9, 2, {"b": 5, "a": 1}, ("c",)), lambda: 1234.5)
    values = samples(metrics)
    assert values["lora_requests_info", "8", "a,b", "c"] == 1234.5
    assert values["lora_requests_total", "adapter 0"] == 1
    assert values["lora_prompt_tokens_total", "adapter 99"] == 5
    assert values["lora_generation_tokens_total", "(other)"] == 50 * 3
    assert len([labels for labels in values if labels[0] == "lora_requests_total"]) == 101
    assert values["lora_reads_total",] == 3 and values["lora_evictions_total",] == 2
    assert values["lora_adapters",] == 9 and values["lora_adapters_in_use",] == 2
    assert values["lora_requests_waiting",] == 2


def test_offloaded_blocks_are_counted_by_tier_and_only_where_there_are_any() -> None:
    metrics = make_metrics()
    assert not any(name.startswith("kv_offload") for name, *_ in samples(metrics))
    offloading = metrics.offloading(0)
    offloading.step_done(StepResult(0, 0, (), 0.1), 0, 0.1, 16.0)
    report = TransferReport((1,), (), 5, 4, 3, num_unwritten=2, num_in_memory=6, num_on_disk=7, block_bytes=100)
    for _ in range(2):
        offloading.step_done(StepResult(0, 0, (), 0.1, transfers=report), 0, 0.1, 16.0)
    values = samples(metrics)
    assert values["kv_offload_stored_blocks_total",] == 10 and values["kv_offload_failed_loads_total",] == 2
    assert values["kv_offload_loaded_blocks_total", "memory"] == 8
    assert values["kv_offload_loaded_blocks_total", "disk"] == 6
    assert values["kv_offload_unwritten_blocks_total",] == 4
    assert values["kv_offload_bytes", "memory"] == 600 and values["kv_offload_bytes", "disk"] == 700


def test_handed_over_blocks_are_counted_only_where_prefill_and_decode_are_apart() -> None:
    metrics = make_metrics()
    assert not any(name.startswith("kv_transfer") for name, *_ in samples(metrics))
    transfers = metrics.transfers(0)
    transfers.step_done(StepResult(0, 0, (), 0.1), 0, 0.1, 16.0)
    report = TransferReport((1,), (), num_sent=5, num_received=3, block_bytes=100)
    for _ in range(2):
        transfers.step_done(StepResult(0, 0, (), 0.1, transfers=report), 0, 0.1, 16.0)
    transfers.fetch_failed()
    values = samples(metrics)
    assert values["kv_transfer_sent_blocks_total",] == 10 and values["kv_transfer_loaded_blocks_total",] == 6
    assert values["kv_transfer_failed_loads_total",] == 2 and values["kv_transfer_failed_fetches_total",] == 1


def test_several_answers_of_an_adapter_count_their_prompt_once() -> None:
    metrics, adapter = make_metrics(), LoraAdapter(1, "/path", name="sql")
    leader = make_sequence(prompt_length=5)
    leader.adapter = adapter
    fork = Sequence(1, leader.token_ids, leader.sampling, leader=leader, adapter=adapter)
    for sequence in (leader, fork):
        metrics.adapters.sequence_ended(sequence, FinishReason.STOP, 3, 13.0, 15.0, 16.0)
    found = samples(metrics)
    assert found["lora_requests_total", "sql"] == 2 and found["lora_generation_tokens_total", "sql"] == 6
    assert found["lora_prompt_tokens_total", "sql"] == 5
