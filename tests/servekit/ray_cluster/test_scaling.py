"""Claims about what a server reports to Ray Serve, and how many servers Ray Serve then runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from servekit.ray_cluster.scaling import LOAD, WAIT, WAITING, PredictedWaitPolicy, report

METRICS = """\
# HELP servekit_predicted_wait_seconds Predicted seconds.
# TYPE servekit_predicted_wait_seconds gauge
servekit_predicted_wait_seconds{model_name="a",replica="0"} 4.0
servekit_predicted_wait_seconds{model_name="a",replica="1"} 1.0
servekit_predicted_wait_seconds{model_name="b",replica="0"} 2.5
servekit_workers_alive{model_name="a",replica="0"} 1.0
servekit_workers_alive{model_name="a",replica="1"} 1.0
servekit_workers_alive{model_name="b",replica="0"} 1.0
servekit_num_requests_running{model_name="a",replica="0"} 3.0
servekit_num_requests_running{model_name="a",replica="1"} 2.0
servekit_num_requests_waiting{model_name="a",replica="0"} 1.0
servekit_num_requests_waiting_limit 512.0
servekit_num_requests_waiting_by_reason{model_name="a",reason="capacity"} 100.0
"""


def context(metrics: dict[str, dict[str, float]], current: int = 2) -> SimpleNamespace:
    return SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=current, target_num_replicas=2)


def test_a_server_reports_the_shortest_wait_of_its_replicas_for_the_model_with_the_longest() -> None:
    assert report(METRICS, num_slots=4) == {WAIT: 2.5, WAITING: 0.0, LOAD: pytest.approx((4 / 4 + 2 / 4) / 2)}


def test_the_load_of_a_server_counts_its_kv_blocks() -> None:
    usage = 'servekit_kv_cache_usage_perc{model_name="a",replica="1"} 0.95\n'
    assert report(METRICS + usage, num_slots=4)[LOAD] == pytest.approx((1.0 + 0.95) / 2)


def test_replicas_without_a_live_worker_are_left_out() -> None:
    one = METRICS.replace('alive{model_name="a",replica="1"} 1.0', 'alive{model_name="a",replica="1"} 0.0')
    assert report(one, num_slots=4) == {WAIT: 4.0, WAITING: 1.0, LOAD: 1.0}
    assert report("", num_slots=4) == {}
    assert report(METRICS.replace("} 1.0", "} 0.0"), num_slots=4) == {}


def test_the_policy_takes_the_shortest_wait_and_the_sum_of_loads() -> None:
    policy = PredictedWaitPolicy(target_wait_s=2.0)
    assert policy(context({WAIT: {"a": 3.0, "b": 9.0}, LOAD: {"a": 1.0, "b": 1.0}})) == (3.0, {})
    assert policy(context({WAIT: {"a": 0.0, "b": 9.0}, LOAD: {"a": 0.1, "b": 1.0}})) == (2, {})
    assert policy(context({WAIT: {"a": 0.0, "b": 0.0}, LOAD: {"a": 0.1, "b": 0.1}})) == (1, {})
    assert policy(context({WAIT: {"a": 0.0, "b": 0.0}, LOAD: {"a": 0.1, "b": 0.1}}, current=4)) == (3, {})


def test_the_policy_removes_no_server_while_requests_wait() -> None:
    policy, loads = PredictedWaitPolicy(target_wait_s=2.0), {LOAD: {"a": 0.1, "b": 0.1}}
    assert policy(context({WAIT: {"a": 1.5, "b": 1.5}, **loads})) == (2, {})
    assert policy(context({WAIT: {"a": 0.0, "b": 0.0}, WAITING: {"a": 1.0, "b": 2.0}, **loads})) == (2, {})
    assert policy(context({WAIT: {"a": 0.01, "b": 0.0}, WAITING: {"a": 0.2, "b": 2.0}, **loads})) == (1, {})


def test_without_reports_the_policy_changes_nothing() -> None:
    policy = PredictedWaitPolicy(target_wait_s=2.0)
    assert policy(context({})) == (2, {})
    assert policy(context({WAIT: {"a": 9.0}}, current=0)) == (2, {})
