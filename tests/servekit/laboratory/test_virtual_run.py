"""Claims about runs in virtual time, with figures that can be computed by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from servekit.errors import ConfigError
from servekit.laboratory.batching import MODES
from servekit.laboratory.summary import Summary, summarise
from servekit.laboratory.timeline import Timeline
from servekit.laboratory.virtual_run import LabSettings, VirtualRun
from servekit.laboratory.workload import LabRequest, Workload
from servekit.laboratory.workload_generator import make_workload
from servekit.simulation.model import parse_simulated

TEXTBOOK = LabSettings(max_steps_in_flight=1)  # as textbooks do: a step is planned when the one before it is done


def play(mode: str, workload: Workload, settings: LabSettings = TEXTBOOK, model: str = "sim:step=10ms") -> Timeline:
    return VirtualRun(workload, MODES[mode], settings, parse_simulated(model)).play()


def figures(mode: str, workload: Workload, settings: LabSettings = TEXTBOOK, model: str = "sim:step=10ms") -> Summary:
    return summarise(play(mode, workload, settings, model), settings.num_slots)


def test_the_textbooks_static_batch_makes_170_tokens_a_second() -> None:
    """Seven answers of 50 tokens and one of 500: 850 tokens in 500 steps of 10 ms."""
    summary = figures("static", make_workload("textbook", 8, 0, float("inf")))
    assert summary.tokens_per_s == pytest.approx(170) and summary.duration_s == pytest.approx(5)
    assert summary.idle_slot_share == pytest.approx(7 * 450 / (8 * 500))


@pytest.mark.parametrize("mode", ["continuous", "chunked"])
def test_continuous_batching_makes_the_textbooks_800_while_requests_wait(mode: str) -> None:
    workload = make_workload("textbook", 64, 0, float("inf"))
    assert figures(mode, workload).tokens_per_s_while_waiting == pytest.approx(800)
    assert figures("static", workload).tokens_per_s_while_waiting == pytest.approx(170, rel=0.02)


def test_continuous_batching_gains_nothing_if_nothing_waits() -> None:
    """What textbooks leave out: the same eight requests take as long as in a static batch."""
    workload = make_workload("textbook", 8, 0, float("inf"))
    assert figures("continuous", workload).duration_s == figures("static", workload).duration_s


@pytest.mark.parametrize("mode", MODES)
def test_every_request_gets_all_of_its_tokens_in_every_mode(mode: str) -> None:
    for seed in range(2):
        workload = make_workload(random.Random(seed).choice(["chat", "documents"]), 40, seed, 25.0)
        timeline = play(mode, workload, LabSettings(), "sim:h100-8b")
        assert [len(each.token_times_s) for _, each in sorted(timeline.requests.items())] == [
            request.num_output_tokens for request in workload.requests
        ]


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_has_one_request_at_a_time(mode: str) -> None:
    timeline = play(mode, make_workload("chat", 60, 3, 40.0), LabSettings(), "sim:h100-8b")
    for slot in range(8):
        taken = sorted(
            (request.admitted_s or 0.0, request.ended_s)
            for request in timeline.requests.values()
            if request.slot == slot
        )
        assert all(ended_s <= admitted_s for (_, ended_s), (admitted_s, _) in pairwise(taken))


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    workload = Workload("one", (LabRequest(2.0, tuple(range(100)), 10),))
    (request,) = play("chunked", workload, LabSettings(chunk_tokens=32)).requests.values()
    assert request.admitted_s == 2.0 and request.token_times_s[0] == pytest.approx(2.0 + 4 * 0.01)  # 100 tokens by 32
    assert request.ended_s == pytest.approx(2.0 + (4 + 9) * 0.01) and len(request.prefills) == 4


def test_chunks_keep_the_tokens_of_others_from_waiting_for_a_long_prompt() -> None:
    workload = Workload("two", (LabRequest(0.0, (1,) * 8, 50), LabRequest(0.1, (2,) * 800, 4)))
    model = "sim:step=5ms,prefill=100us"
    whole, chunked = (figures(mode, workload, LabSettings(), model) for mode in ("continuous", "chunked"))
    assert whole.itl_p99_s == pytest.approx(5e-3 + 799 * 100e-6)
    assert chunked.itl_p99_s <= 5e-3 + 64 * 100e-6


def test_contiguous_memory_holds_fewer_requests_and_leaves_most_of_it_unused() -> None:
    workload = make_workload("chat", 40, 0, float("inf"))
    paged = LabSettings(num_kv_tokens=4096, max_model_len=1024)
    contiguous = LabSettings(num_kv_tokens=4096, max_model_len=1024, is_paged=False)
    assert contiguous.num_slots_of(MODES["continuous"]) == 4 and paged.num_slots_of(MODES["continuous"]) == 8
    assert figures("continuous", workload, paged, "sim:h100-8b").unused_memory_share < 0.1
    assert figures("continuous", workload, contiguous, "sim:h100-8b").unused_memory_share > 0.7


def test_contiguous_memory_for_less_than_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-tokens"):
        LabSettings(num_kv_tokens=512, max_model_len=1024, is_paged=False).scheduler(MODES["static"])


def test_the_prefix_cache_finds_the_system_prompt() -> None:
    workload = make_workload("chat", 40, 0, 20.0)
    on, off = (
        figures("chunked", workload, LabSettings(has_prefix_cache=is_on), "sim:h100-8b") for is_on in (True, False)
    )
    assert off.cached_prompt_share == 0.0 < on.cached_prompt_share and on.ttft_p50_s < off.ttft_p50_s
