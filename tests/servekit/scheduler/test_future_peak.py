"""Claims about the future peak of memory, and that it is the same when it is kept up to date as when computed anew."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.protocol.messages import StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.future_peak import Demand, FuturePeak, future_peak
from servekit.scheduler.kv_cache_manager import KVCacheManager, PrefixMatch
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.service import Simulation
from tests.servekit.simulation.scenarios import make_scenario

demands = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def peak_by_playing_it(pairs: list[tuple[int, int]], block_size: int) -> int:
    """Grow all of them step by step, and measure."""
    longest = max((to_come for _, to_come in pairs), default=0)
    return max(
        (
            sum(-(-(held + step) // block_size) for held, to_come in pairs if step <= to_come)
            for step in range(longest + 1)
        ),
        default=0,
    )


@given(demands)
def test_the_peak_is_exact_for_blocks_of_one_token(pairs: list[tuple[int, int]]) -> None:
    assert future_peak(pairs, 1) == peak_by_playing_it(pairs, 1)


@given(demands, st.integers(2, 16))
def test_the_peak_is_too_high_by_less_than_a_block_per_sequence_and_never_too_low(
    pairs: list[tuple[int, int]], block_size: int
) -> None:
    truth, bound = peak_by_playing_it(pairs, block_size), future_peak(pairs, block_size)
    assert truth <= bound <= truth + len(pairs)


def test_the_peak_is_far_below_the_sum_of_what_each_may_need() -> None:
    staggered = [(100 - to_come, to_come) for to_come in range(0, 100, 10)]
    assert future_peak(staggered, 1) < 10 * 100 * 0.6


class SmallWindows(FuturePeak):
    """With few sequences, windows are split and joined as they are with many."""

    WINDOW_SIZE = 2


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(0, 40)),
        st.tuples(st.just("remove"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("ask"), st.integers(1, 40), st.integers(0, 40)),
    ),
    max_size=120,
)


@given(events, st.integers(1, 16), st.booleans(), st.randoms(use_true_random=False))
def test_the_peak_that_is_kept_is_the_peak_computed_anew(
    history: list[tuple[str, int, int]], block_size: int, is_small: bool, rng: random.Random
) -> None:
    """Sequences come and go, and in each step all grow by a token, but for a few that stay as they are."""
    peak = SmallWindows(block_size) if is_small else FuturePeak(block_size)
    demands: list[Demand] = []
    entries: list[tuple[int, int]] = []
    for event, first, second in history:
        if event == "add":
            demands.append((first, second))
            entries.append(peak.entry(demands[-1]))
            peak.add(entries[-1])
        elif event == "remove" and demands:
            index = first % len(demands)
            peak.remove(entries.pop(index))
            del demands[index]
        elif event == "step":
            peak.advance()
            still = {
                index for index, (_, to_come) in enumerate(demands) if not to_come or (first and rng.random() < 0.2)
            }
            for index in still:
                peak.remove(entries[index])
            for index, (held, to_come) in enumerate(demands):
                if index in still:
                    entries[index] = peak.entry((held, to_come))
                    peak.add(entries[index])
                else:
                    demands[index] = held + 1, to_come - 1
        elif event == "ask":
            expected = future_peak([*demands, (first, second)], block_size)
            for num_blocks in rng.sample(range(expected - 2, expected + 3), 5):
                assert peak.fits((first, second), num_blocks) is (expected <= num_blocks)
        peak.check(entries)


def test_a_sequence_that_ends_before_the_peak_does_not_fit_if_the_peak_is_too_high_without_it() -> None:
    peak, demands = SmallWindows(1), [(1, 2)] * 2 + [(1, 50)] * 4
    for demand in demands:
        peak.add(peak.entry(demand))
    assert future_peak(demands, 1) == 4 * 51
    assert not peak.fits((1, 1), 4 * 51 - 1)
    assert peak.fits((1, 1), 4 * 51)


def test_many_sequences_are_in_windows_and_most_of_them_are_decided_by_their_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peak, rng = FuturePeak(16), random.Random(1)
    demands = [(rng.randint(1, 400), rng.randint(1, 4000)) for _ in range(1000)]
    for demand in demands:
        peak.add(peak.entry(demand))
    computed: list[int] = []
    peak_in = FuturePeak._peak_in
    monkeypatch.setattr(
        FuturePeak, "_peak_in", lambda self, index, *added: computed.append(index) or peak_in(self, index, *added)
    )
    most = future_peak(demands, 16)
    for _ in range(100):
        demand = rng.randint(1, 400), rng.randint(1, 4000)
        expected = future_peak([*demands, demand], 16) <= most + 10
        assert peak.fits(demand, most + 10) is expected
    assert 7 < len(peak._windows) < 40
    assert len(computed) < 300, "a handful of windows at first, and then about one in each question"


def compare_decisions(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Compare each decision with that of `fits`, which computes the peak anew, and each entry with its sequence.

    Returns how many decisions there were of each kind.
    """
    decisions: Counter[bool] = Counter()

    def decide(peak: FuturePeak, demand: Demand, num_blocks: int) -> bool:
        decided = fits(peak, demand, num_blocks)
        asked.append(decided)
        return decided

    def has_room(self: KVCacheManager, sequence: Sequence, match: PrefixMatch, running: list[Sequence]) -> bool:
        asked.clear()
        room = original(self, sequence, match, running)
        if asked:
            assert room is self.fits(sequence, match, running), f"{sequence} beside {len(running)} others"
            decisions[room] += 1
            for other in running:
                demand = self._demand(other, other.kv.num_found)
                assert self._future_peak.is_entry_of(demand, other.kv.peak_entry)
        return room

    asked: list[bool] = []
    fits, original = FuturePeak.fits, KVCacheManager.has_room
    monkeypatch.setattr(FuturePeak, "fits", decide)
    monkeypatch.setattr(KVCacheManager, "has_room", has_room)
    return decisions


@pytest.mark.parametrize("is_small", [False, True], ids=["as served", "small windows, no rebuilding"])
def test_decisions_are_those_of_the_peak_computed_anew_whatever_happens(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation's faults, forks, drafts, deferred tokens, preemptions, unknown lengths, restarts and moves."""
    decisions = compare_decisions(monkeypatch)
    if is_small:
        monkeypatch.setattr(FuturePeak, "WINDOW_SIZE", 2)
        monkeypatch.setattr(KVCacheManager, "REBUILD_RATIO", 0)
    for seed in range(32):
        scenario = make_scenario(seed, 80)
        scheduler = scenario.scheduler
        if seed % 4 > 1:  # more of them at the same time
            scheduler = msgspec.structs.replace(scheduler, num_blocks=6 * scheduler.num_blocks, max_num_seqs=64)
        Simulation(msgspec.structs.replace(scenario, scheduler=scheduler)).run()
    assert min(decisions[True], decisions[False]) > 100, decisions


def play(manager: WorkloadManager, rng: random.Random, prompt_lengths: list[int], open_ends: float) -> None:
    """Keep the queue full for 400 steps. Some sequences stop early, some tokens are deferred, some drafts rejected."""
    config, next_id, plans = manager.config, 0, []
    for step in range(400):
        while manager.num_waiting < 40:
            command = AddSequence(
                sequence_id=next_id,
                prompt_token_ids=tuple(rng.choices(range(1, 50), k=rng.choice(prompt_lengths))),
                sampling=SamplingParams(max_tokens=rng.randint(1, 120)),
                has_length_bound=rng.random() >= open_ends,
                max_drafts=config.max_drafts,
            )
            manager.add(command)
            next_id += 1
        plan = manager.plan(step / 1000)
        manager.check()
        if plan is not None:
            plans.append(plan)
        if plan is None or rng.random() < 0.5:
            plan = plans.pop(0)
            drafts = tuple(chunk.num_drafts for chunk in plan.chunks if chunk.samples)
            deferred = tuple(index for index, number in enumerate(drafts) if not number and rng.random() < 0.01)
            counts = tuple(1 + rng.randint(0, number) for number in drafts)
            tokens = tuple(rng.choices(range(100), k=sum(counts)))
            result = StepResult(
                plan.epoch, plan.step_id, tokens, 0.0, deferred=deferred, counts=counts, num_drafts=drafts
            )
            manager.commit(result, step / 1000)


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("open_ends", [0.0, 0.1], ids=["bounded", "some unbounded"])
def test_decisions_for_many_sequences_are_those_of_the_peak_computed_anew(
    num_stages: int, open_ends: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred sequences, in a pool that holds half of them."""
    decisions = compare_decisions(monkeypatch)
    config = SchedulerConfig(
        num_blocks=900,
        block_size=4,
        max_model_len=1000,
        max_num_seqs=200,
        max_num_batched_tokens=220,
        eos_token_ids=frozenset({0}),
        max_steps_in_flight=2 if num_stages == 1 else num_stages,
        pipeline_parallel_size=num_stages,
        max_admissions_per_step=16,
    )
    play(WorkloadManager(config), random.Random(num_stages), [1, 5, 30], open_ends)
    assert min(decisions[True], decisions[False]) > 50, decisions


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_decisions_beside_slow_prompts_and_drafts_are_those_of_the_peak_computed_anew(
    seed: int, max_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt advances by a token in each step, as decodes do, because short ones take the rest."""
    decisions = compare_decisions(monkeypatch)
    monkeypatch.setattr(KVCacheManager, "REBUILD_RATIO", 0)
    config = SchedulerConfig(
        num_blocks=90,
        block_size=4,
        max_model_len=1000,
        max_num_seqs=12,
        max_num_batched_tokens=12 + 2 * max_drafts,
        eos_token_ids=frozenset({0}),
        max_steps_in_flight=2,
        scheduling_policy="shortest",
        max_drafts=max_drafts,
    )
    play(WorkloadManager(config), random.Random(seed), [1, 5, 30, 100], 0.0)
    assert min(decisions[True], decisions[False]) > 5, decisions
