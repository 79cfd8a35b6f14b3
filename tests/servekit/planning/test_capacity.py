"""Claims about what a replica can serve, with step times that make it easy to compute by hand."""

from __future__ import annotations

import pytest

from servekit.errors import ConfigError
from servekit.laboratory.timeline import RequestTimeline
from servekit.laboratory.virtual_run import LabSettings
from servekit.laboratory.workload import Workload
from servekit.planning.capacity import measure_capacity, meets
from servekit.planning.demand import Demand, ServiceLevel, make_requests, parse_service_level
from servekit.simulation.model import parse_simulated

DEMAND = Demand(prompt_tokens=20, output_tokens=50, max_length=512, num_requests=80)
SETTINGS = LabSettings(num_slots=8, num_kv_tokens=8192, chunk_tokens=512, has_prefix_cache=False)
STEP_10_MS = parse_simulated("sim:step=10ms")


def requests(rate: float, seed: int) -> Workload:
    return make_requests(DEMAND, rate, seed)


def test_the_highest_rate_is_that_of_slots_that_are_always_taken() -> None:
    """Eight slots, 100 steps/s: 800 tokens/s, which is 16 answers of 50 tokens."""
    capacity = measure_capacity(requests, SETTINGS, STEP_10_MS, ServiceLevel(), (0,))
    assert capacity.max_rate == pytest.approx(16, rel=0.15)
    assert 0.5 * capacity.max_rate < capacity.slo_rate <= capacity.max_rate


@pytest.mark.parametrize("num_requests", [1, 3, 6])
def test_few_requests_that_never_wait_have_a_rate_too(num_requests: int) -> None:
    few = Demand(prompt_tokens=5, output_tokens=1, max_length=512, num_requests=num_requests)
    capacity = measure_capacity(
        lambda rate, seed: make_requests(few, rate, seed), SETTINGS, STEP_10_MS, ServiceLevel(), (0,)
    )
    assert capacity.max_rate > 0


def test_a_limit_below_a_steps_time_is_never_kept() -> None:
    capacity = measure_capacity(requests, SETTINGS, STEP_10_MS, ServiceLevel(tpot_s=0.009), (0,))
    assert capacity.slo_rate == 0.0 and all(point.goodput == 0.0 for point in capacity.points)


def test_latency_grows_and_goodput_falls_beyond_the_highest_rate() -> None:
    points = measure_capacity(requests, SETTINGS, STEP_10_MS, ServiceLevel(ttft_s=0.3), (0, 1)).points
    ttft = [point.summary.ttft_p99_s for point in points]
    assert ttft == sorted(ttft) and points[-1].goodput < points[-1].rate
    assert points[0].goodput == pytest.approx(points[0].rate) and points[0].goodput_error == pytest.approx(0.0)


def test_a_request_keeps_its_limits_by_its_first_token_and_its_mean_pause() -> None:
    request = RequestTimeline(sequence_id=0, arrival_s=1.0, num_prompt_tokens=1, token_times_s=[1.5, 1.6, 1.9])
    assert meets(request, ServiceLevel(ttft_s=0.5, tpot_s=0.21)) and not meets(request, ServiceLevel(tpot_s=0.19))
    assert not meets(request, ServiceLevel(ttft_s=0.4, tpot_s=1.0))
    assert meets(
        RequestTimeline(sequence_id=0, arrival_s=1.0, num_prompt_tokens=1, token_times_s=[1.1]), ServiceLevel()
    )


def test_lengths_and_arrivals_have_the_wanted_means() -> None:
    demand = Demand(prompt_tokens=300, output_tokens=80, max_length=8192, num_requests=4000)
    made = make_requests(demand, 10.0, 1).requests
    assert sum(len(each.prompt) for each in made) / 4000 == pytest.approx(300, rel=0.05)
    assert sum(each.num_output_tokens for each in made) / 4000 == pytest.approx(80, rel=0.05)
    assert made[-1].arrival_s == pytest.approx(400, rel=0.1)


def test_a_service_level_is_written_with_units() -> None:
    assert parse_service_level("ttft:500ms, tpot:0.05s") == ServiceLevel(ttft_s=0.5, tpot_s=0.05)
    assert parse_service_level("tpot:20ms") == ServiceLevel(tpot_s=0.02)
    for wrong in ("ttft", "ttft:0ms", "e2e:1s", "ttft:-1s", "ttft:1s,tpot:fast"):
        with pytest.raises(ConfigError, match="ttft:500ms"):
            parse_service_level(wrong)
