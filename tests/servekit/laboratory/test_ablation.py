"""Claims about experiments that change one thing."""

from __future__ import annotations

import pytest

from servekit.laboratory.ablation import ABLATIONS, knee
from servekit.laboratory.summary import Summary, summarise
from servekit.laboratory.virtual_run import LabSettings, VirtualRun
from servekit.laboratory.workload_generator import make_workload
from servekit.simulation.model import parse_simulated


def play(name: str, workload: str = "chat", model: str = "sim:h100-8b", num_requests: int = 32) -> dict[str, Summary]:
    settings = LabSettings(num_kv_tokens=4096)
    cases = ABLATIONS[name].cases(make_workload(workload, num_requests, 0, 20.0), settings)
    return {
        case.label: summarise(
            VirtualRun(case.workload, case.mode, case.settings, parse_simulated(model)).play(), case.settings.num_slots
        )
        for case in cases
    }


def test_without_a_kv_cache_the_time_of_an_answer_grows_with_its_square() -> None:
    """With 1 ms a token and nothing else: 32 + 199 positions with a KV cache, and 32 + ... + 231 without one."""
    runs = play("kv-cache", model="sim:prefill=1ms,decode=1ms")
    assert runs["200 tokens, with"].duration_s == pytest.approx((32 + 199) * 1e-3)
    assert runs["200 tokens, without"].duration_s == pytest.approx(sum(range(32, 232)) * 1e-3)
    assert runs["200 tokens, with"].last_token_s == pytest.approx(1e-3)
    assert runs["200 tokens, without"].last_token_s == pytest.approx(231e-3)


def test_block_sizes_with_which_the_cache_cannot_hold_the_longest_request_are_left_out() -> None:
    workload = make_workload("chat", 1, 0, 1.0)
    settings = LabSettings(num_kv_tokens=workload.max_length + 7, max_model_len=workload.max_length)
    cases = ABLATIONS["block-size"].cases(workload, settings)
    assert 1 <= len(cases) < 7
    for case in cases:
        num_in_blocks = settings.num_kv_tokens // case.settings.block_size * case.settings.block_size
        assert num_in_blocks >= workload.max_length


def test_answers_that_do_not_fit_into_the_context_are_left_out() -> None:
    cases = ABLATIONS["kv-cache"].cases(make_workload("chat", 1, 0, 1.0), LabSettings(max_model_len=100))
    assert [case.label for case in cases[::2]] == ["1 token, with", "25 tokens, with", "50 tokens, with"]


def test_the_knee_is_the_last_run_if_every_one_gains() -> None:
    runs = list(play("batch-size", model="sim:step=4ms", num_requests=128).values())
    assert knee(runs) == len(runs) - 1


def test_the_knee_is_sought_only_where_requests_waited() -> None:
    """With eight requests, more than four slots leave nobody waiting."""
    runs = play("batch-size", "textbook", "sim:step=4ms", num_requests=8)
    assert list(runs)[knee(list(runs.values()))] == "4 slots" and runs["8 slots"].tokens_per_s_while_waiting == 0.0


def test_larger_chunks_trade_inter_token_latency_for_first_tokens() -> None:
    runs = list(play("chunks", "documents").values())
    assert runs[0].itl_p99_s < runs[-1].itl_p99_s and runs[0].ttft_p99_s > runs[-1].ttft_p99_s


def test_larger_blocks_leave_more_memory_unused() -> None:
    shares = [run.unused_memory_share for run in play("block-size").values()]
    assert shares == sorted(shares) and shares[0] < 0.01 < 0.1 < shares[-1]


def test_more_slots_give_more_tokens_until_the_device_computes_without_pause() -> None:
    """A step takes 1 ms and as much again for each sequence: 16 slots give 16/17 of the most, so 4 to 8 is the knee."""
    runs = play("batch-size", model="sim:step=4ms,decode=1ms", num_requests=128)
    rates = [run.tokens_per_s_while_waiting for run in runs.values()]
    assert rates == sorted(rates)
    assert list(runs)[knee(list(runs.values()))] == "8 slots"


@pytest.mark.parametrize("name", ["prefix-cache", "memory"])
def test_turning_a_part_off_makes_first_tokens_later(name: str) -> None:
    without, with_it = play(name).values()
    assert with_it.ttft_p50_s < without.ttft_p50_s
