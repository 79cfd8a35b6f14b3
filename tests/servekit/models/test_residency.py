"""Which models are loaded and which make room, with time as a value."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import inf

import pytest

from servekit.models.residency import (
    DEFAULT_LOAD_S,
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    RECENT_S,
    TURN_S,
    Admit,
    Load,
    ModelNeeds,
    Residency,
    State,
    Unload,
)

CAPACITY = {"cpu": 200}


def on_cpu(*names: str, memory: int = 100) -> list[ModelNeeds]:
    return [ModelNeeds(name, {"cpu": memory}) for name in names]


def loaded(residency: Residency, names: Iterable[str]) -> None:
    """Load models one second after the other, and let each be used for an instant."""
    for now_s, name in enumerate(names):
        residency.mark_requested(name, now_s)
        assert Load(name) in residency.plan(now_s)
        residency.loaded(name, now_s)


def test_first_request_loads_a_model_once_and_all_who_wait_are_admitted() -> None:
    residency = Residency(CAPACITY, on_cpu("a"))
    assert residency.state("a") is State.COLD and not residency.begin_use("a", 0.0)
    residency.mark_requested("a", 0.0)
    residency.mark_requested("a", 0.5)
    assert residency.state("a") is State.WAITING and residency.position("a") == 1
    assert residency.plan(0.5) == [Load("a")]
    assert residency.state("a") is State.LOADING and residency.position("a") == 0
    residency.mark_requested("a", 1.0)
    assert residency.plan(1.0) == []
    residency.loaded("a", 2.0)
    assert residency.plan(2.0) == [Admit("a")] and residency.state("a") is State.READY
    residency.add_use("a", 2.0)
    assert residency.begin_use("a", 3.0) and residency.num_uses("a") == 2


def test_model_used_least_recently_makes_room() -> None:
    residency = Residency(CAPACITY, on_cpu("a", "b", "c"))
    loaded(residency, "ab")
    assert residency.begin_use("a", 5.0)
    residency.end_use("a", 6.0)
    residency.mark_requested("c", 7.0)
    assert residency.plan(7.0) == [Unload("b")] and residency.state("b") is State.UNLOADING
    assert residency.plan(7.1) == [], "it waits for the memory"
    residency.unloaded("b")
    assert residency.plan(8.0) == [Load("c")] and residency.state("b") is State.COLD
    residency.loaded("c", 9.0)


def test_model_that_is_used_is_never_unloaded_and_one_that_is_kept_neither() -> None:
    kept = ModelNeeds("kept", {"cpu": 100}, is_kept=True)
    residency = Residency(CAPACITY, [kept, *on_cpu("a", "b")])
    assert residency.plan(0.0) == [Load("kept")]
    residency.loaded("kept", 1.0)
    residency.mark_requested("a", 1.0)
    assert residency.plan(1.0) == [Load("a")]
    residency.loaded("a", 2.0)
    assert residency.begin_use("a", 2.0)
    residency.mark_requested("b", 3.0)
    assert residency.plan(3.0) == [] and residency.plan(1000.0) == []
    residency.end_use("a", 1001.0)
    assert residency.plan(1001.0) == [Unload("a")]


def test_model_that_others_keep_using_is_closed_after_its_turn_and_then_makes_room() -> None:
    residency = Residency({"cpu": 100}, on_cpu("busy", "cold"))
    loaded(residency, ["busy"])
    assert residency.begin_use("busy", 1.0)
    residency.mark_requested("cold", 2.0)
    assert residency.plan(2.0) == [] and residency.next_s(2.0) == 2.0 + TURN_S
    assert residency.begin_use("busy", 2.0 + TURN_S - 0.1)
    assert residency.plan(2.0 + TURN_S) == []
    assert not residency.begin_use("busy", 2.0 + TURN_S), "it is closed"
    assert residency.next_s(2.0 + TURN_S) == inf
    residency.mark_requested("busy", 13.0)
    assert residency.plan(13.0) == [] and residency.position("busy") == 2
    residency.end_use("busy", 14.0)
    assert residency.plan(14.0) == []
    residency.end_use("busy", 15.0)
    assert residency.plan(15.0) == [Unload("busy")]
    residency.unloaded("busy")
    assert residency.plan(16.0) == [Load("cold")]
    residency.loaded("cold", 17.0)
    assert residency.plan(17.0) == [Unload("cold")], "nobody waits for it any more, and the other one does"


def test_closed_model_opens_again_when_nobody_waits_for_its_memory() -> None:
    residency = Residency({"cpu": 100}, on_cpu("busy", "cold"))
    loaded(residency, ["busy"])
    assert residency.begin_use("busy", 1.0)
    residency.mark_requested("cold", 2.0)
    residency.plan(2.0 + TURN_S)
    residency.mark_requested("busy", 13.0)
    residency.clear_requested("cold")
    assert residency.plan(14.0) == [Admit("busy")] and residency.begin_use("busy", 14.0)


def test_models_wait_in_line_but_those_on_other_devices_do_not() -> None:
    needs = [*on_cpu("big", memory=200), *on_cpu("small"), ModelNeeds("gpu", {"cuda:0": 5}), ModelNeeds("none")]
    residency = Residency({"cpu": 200, "cuda:0": 5}, [*needs, *on_cpu("used")])
    loaded(residency, ["used"])
    assert residency.begin_use("used", 1.0)
    for now_s, name in enumerate(("big", "small", "gpu", "none"), 2):
        residency.mark_requested(name, float(now_s))
    assert [residency.position(name) for name in ("big", "small", "gpu", "none")] == [1, 2, 1, 1]
    assert residency.plan(6.0) == [Load("gpu"), Load("none")]
    residency.end_use("used", 7.0)
    assert residency.plan(7.0) == [Unload("used")]
    residency.unloaded("used")
    assert residency.plan(8.0) == [Load("big")]


def test_model_that_is_admitted_does_not_make_room_before_it_was_used() -> None:
    residency = Residency({"cpu": 100}, on_cpu("a", "b"))
    residency.mark_requested("a", 0.0)
    residency.plan(0.0)
    residency.mark_requested("a", 1.0)
    residency.mark_requested("b", 1.0)
    residency.loaded("a", 2.0)
    assert residency.plan(2.0) == [Admit("a")]


@pytest.mark.parametrize(("wait_s", "unloaded"), [(1.0, "c0"), (RECENT_S, "calm")])
def test_tenant_that_names_cold_models_in_turn_unloads_its_own_and_not_those_that_others_work_with(
    wait_s: float, unloaded: str
) -> None:
    """A model that another tenant has not used for a while makes room as any other one."""
    residency = Residency({"cpu": 300}, on_cpu("calm", "c0", "c1", "c2"))
    loaded(residency, ["calm", "c0", "c1"])
    for name, tenant in (("calm", "calm"), ("c0", "flood"), ("c1", "flood")):
        assert residency.begin_use(name, 3.0, tenant)
        residency.end_use(name, 3.0, tenant)
    residency.mark_requested("c2", 3.0 + wait_s, "flood")
    assert residency.plan(3.0 + wait_s) == [Unload(unloaded)]


def test_models_that_others_work_with_make_room_if_those_of_the_tenant_are_not_enough() -> None:
    residency = Residency({"cpu": 300}, [*on_cpu("calm", "own"), *on_cpu("big", memory=300)])
    loaded(residency, ["calm", "own"])
    for name, tenant in (("calm", "calm"), ("own", "flood")):
        assert residency.begin_use(name, 3.0, tenant)
    residency.end_use("own", 3.0, "flood")
    residency.mark_requested("big", 4.0, "flood")
    assert residency.plan(4.0) == []
    residency.end_use("calm", 5.0, "calm")
    assert residency.plan(5.0) == [Unload("own"), Unload("calm")]


def test_own_model_of_the_tenant_that_waits_is_closed_before_one_that_others_use() -> None:
    residency = Residency({"cpu": 200}, on_cpu("calm", "own", "cold"))
    loaded(residency, ["calm", "own"])
    assert residency.begin_use("calm", 3.0, "calm") and residency.begin_use("own", 4.0, "flood")
    residency.mark_requested("cold", 5.0, "flood")
    residency.plan(5.0 + TURN_S)
    assert not residency.begin_use("own", 15.5, "flood") and residency.begin_use("calm", 15.5, "calm")


def test_tenant_waits_for_its_own_model_although_one_that_others_work_with_is_idle() -> None:
    residency = Residency({"cpu": 200}, on_cpu("calm", "own", "cold"))
    loaded(residency, ["calm", "own"])
    assert residency.begin_use("calm", 3.0, "calm") and residency.begin_use("own", 4.0, "flood")
    residency.end_use("calm", 5.0, "calm")
    residency.mark_requested("cold", 5.0, "flood")
    assert residency.plan(5.0) == residency.plan(5.0 + TURN_S) == []
    assert not residency.begin_use("own", 15.5, "flood")
    residency.end_use("own", 16.0, "flood")
    assert residency.plan(16.0) == [Unload("own")]


def test_model_that_others_no_longer_work_with_makes_room_for_one_that_waits_for_a_busy_one() -> None:
    residency = Residency({"cpu": 200}, on_cpu("calm", "own", "cold"))
    loaded(residency, ["calm", "own"])
    assert residency.begin_use("calm", 3.0, "calm") and residency.begin_use("own", 4.0, "flood")
    residency.end_use("calm", 5.0, "calm")
    residency.mark_requested("cold", 6.0, "flood")
    assert residency.plan(6.0 + TURN_S) == []
    assert residency.next_s(6.0 + TURN_S) == 5.0 + RECENT_S
    assert residency.plan(5.0 + RECENT_S) == [Unload("calm")]
    residency.unloaded("calm")
    assert residency.plan(66.0) == [Load("cold")] and residency.begin_use("own", 66.0, "flood"), "it is open again"


def test_tenant_that_names_cold_models_at_once_waits_for_its_own_ones_that_are_being_loaded() -> None:
    residency = Residency({"cpu": 200}, on_cpu("calm", "c0", "c1"))
    loaded(residency, ["calm"])
    assert residency.begin_use("calm", 3.0, "calm")
    residency.end_use("calm", 3.0, "calm")
    residency.mark_requested("c0", 4.0, "flood")
    residency.mark_requested("c1", 4.0, "flood")
    assert residency.plan(4.0) == [Load("c0")]
    residency.mark_requested("c0", 5.0, "calm")  # it is still flood's
    assert residency.plan(5.0) == []


@pytest.mark.parametrize("ends", [True, False])
def test_model_that_others_work_with_stays_theirs_when_a_tenant_touches_it(ends: bool) -> None:
    residency = Residency({"cpu": 200}, on_cpu("calm", "own", "cold"))
    loaded(residency, ["calm", "own"])
    now_s = 3.0
    assert residency.begin_use("calm", now_s, "calm")
    if ends:
        residency.end_use("calm", now_s, "calm")
    else:
        now_s += 2 * RECENT_S
    for name in ("calm", "own"):
        assert residency.begin_use(name, now_s, "flood")
        residency.end_use(name, now_s, "flood")
    residency.mark_requested("cold", now_s, "flood")
    assert residency.plan(now_s) == [Unload("own")]
    residency.unloaded("own")
    assert residency.plan(now_s) == [Load("cold")]
    residency.loaded("cold", now_s)
    residency.mark_requested("own", now_s, "flood")
    assert residency.plan(now_s + TURN_S - 1) == [Unload("cold")], "and calm's is not closed"
    assert residency.begin_use("calm", now_s + TURN_S, "calm")


def test_tenants_that_have_used_a_model_long_ago_do_not_work_with_it_and_are_forgotten() -> None:
    residency = Residency({"cpu": 200}, on_cpu("a", "own", "cold"))
    loaded(residency, ["a", "own"])
    uses = (("a", "calm", 3.0), ("a", "flood", 4.0), ("a", "law", 50.0), ("a", "flood", 64.0), ("own", "flood", 65.0))
    for name, tenant, now_s in uses:
        assert residency.begin_use(name, now_s, tenant)
        residency.end_use(name, now_s, tenant)
    assert [*residency._models["a"].used_s_by] == ["law", "flood"]
    residency.mark_requested("cold", 66.0, "flood")
    assert residency.plan(66.0) == [Unload("own")], "law works with the other one"


def test_models_of_others_that_are_being_loaded_are_not_waited_for() -> None:
    residency = Residency({"cpu": 200}, on_cpu("calm", "law", "cold"))
    loaded(residency, ["calm"])
    assert residency.begin_use("calm", 3.0, "calm")
    residency.end_use("calm", 3.0, "calm")
    residency.mark_requested("law", 4.0, "law")
    residency.mark_requested("cold", 4.0, "flood")
    assert residency.plan(4.0) == [Load("law"), Unload("calm")]


def test_model_is_of_the_tenant_it_was_loaded_for_also_before_its_first_use() -> None:
    residency = Residency({"cpu": 200}, on_cpu("calm", "own", "cold"))
    for now_s, (name, tenant) in enumerate((("calm", "calm"), ("own", "flood"))):
        residency.mark_requested(name, now_s, tenant)
        assert residency.plan(now_s) == [Load(name)]
        residency.loaded(name, now_s)
    residency.mark_requested("cold", 5.0, "flood")
    assert residency.plan(5.0) == [Unload("own")]


def test_no_model_makes_room_in_vain() -> None:
    residency = Residency({"cpu": 300}, [*on_cpu("idle", "used"), *on_cpu("big", memory=300)])
    loaded(residency, ["idle", "used"])
    assert residency.begin_use("used", 3.0)
    residency.mark_requested("big", 4.0)
    assert residency.plan(4.0) == []
    assert residency.begin_use("idle", 4.5), "it was left alone"


def test_small_models_stay_if_a_large_one_alone_makes_enough_room() -> None:
    residency = Residency({"cpu": 300}, [*on_cpu("small"), *on_cpu("large", memory=200), *on_cpu("new", memory=200)])
    loaded(residency, ["small", "large"])
    residency.mark_requested("new", 5.0)
    assert residency.plan(5.0) == [Unload("large")]


def test_model_needs_room_on_each_of_its_devices() -> None:
    wide = ModelNeeds("wide", {"cuda:0": 60, "cuda:1": 60})
    narrow = [ModelNeeds(f"narrow{number}", {f"cuda:{number}": 60}) for number in range(2)]
    residency = Residency({"cuda:0": 100, "cuda:1": 100}, [wide, *narrow])
    loaded(residency, ["narrow0", "narrow1"])
    residency.mark_requested("wide", 5.0)
    assert residency.plan(5.0) == [Unload("narrow0"), Unload("narrow1")]
    residency.unloaded("narrow0")
    assert residency.plan(6.0) == [] and residency.free("cuda:0") == 100 and residency.free("other") == inf
    residency.unloaded("narrow1")
    assert residency.plan(7.0) == [Load("wide")]


def test_failed_model_is_tried_again_later_and_later() -> None:
    residency = Residency(CAPACITY, on_cpu("a"))
    now_s, pauses = 0.0, []
    for _ in range(9):
        residency.mark_requested("a", now_s)
        assert residency.plan(now_s) == [Load("a")]
        residency.load_failed("a", now_s)
        assert residency.state("a") is State.FAILED and residency.plan(now_s) == []
        pauses.append(residency.retry_s("a") - now_s)
        now_s = residency.retry_s("a")
    assert pauses[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S] and pauses[-1] == MAX_BACKOFF_S
    residency.mark_requested("a", now_s)
    residency.plan(now_s)
    residency.loaded("a", now_s)
    assert residency.retry_s("a") == -inf


def test_kept_model_that_was_lost_is_loaded_again_without_a_request() -> None:
    residency = Residency(CAPACITY, [ModelNeeds("a", {"cpu": 100}, is_kept=True)])
    assert residency.plan(0.0) == [Load("a")]
    residency.loaded("a", 1.0)
    assert residency.begin_use("a", 2.0)
    residency.failing("a")
    assert residency.free("cpu") == 100 and not residency.begin_use("a", 2.5)
    residency.lost("a", 3.0)
    assert residency.num_uses("a") == 0 and residency.free("cpu") == 200
    assert residency.plan(3.0) == [] and residency.next_s(3.0) == 3.0 + FIRST_BACKOFF_S
    assert residency.plan(3.0 + FIRST_BACKOFF_S) == [Load("a")]


def test_dismissed_model_is_unloaded_when_its_last_use_has_ended() -> None:
    residency = Residency(CAPACITY, on_cpu("a"))
    loaded(residency, ["a"])
    assert residency.begin_use("a", 1.0)
    residency.dismiss("a")
    assert residency.plan(1.0) == [] and not residency.begin_use("a", 1.5)
    residency.mark_requested("a", 1.5)
    residency.end_use("a", 2.0)
    assert residency.plan(2.0) == [Unload("a")]
    residency.unloaded("a")
    assert residency.plan(3.0) == [Load("a")], "somebody waited for it"


def test_wait_is_estimated_from_measured_loads_and_those_before() -> None:
    residency = Residency({"cpu": 100}, on_cpu("a", "b", "c"))
    assert residency.expected_wait_s("a", 0.0) == DEFAULT_LOAD_S
    residency.mark_requested("a", 0.0)
    residency.plan(0.0)
    assert residency.expected_wait_s("a", 10.0) == DEFAULT_LOAD_S - 10.0
    residency.loaded("a", 12.0)
    assert residency.expected_wait_s("a", 12.0) == 0.0
    residency.add_use("a", 12.0)
    residency.mark_requested("b", 13.0)
    assert residency.expected_wait_s("b", 13.0) == DEFAULT_LOAD_S
    assert residency.expected_wait_s("c", 13.0) == 2 * DEFAULT_LOAD_S
    assert residency.retry_after_s("c", 13.0) == 60


def test_model_that_was_not_loaded_yet_takes_what_is_assumed_and_a_request_may_come_again_before_it_is_loaded() -> None:
    residency = Residency({"cpu": 100}, on_cpu("a"))
    assert residency.load_s("a") == DEFAULT_LOAD_S
    residency.assumed_load_s = 5.0
    assert residency.load_s("a") == residency.expected_wait_s("a", 0.0) == 5.0
    residency.mark_requested("a", 0.0)
    residency.plan(0.0)
    residency.loaded("a", 90.0)
    residency.dismiss("a")
    residency.plan(91.0)
    residency.unloaded("a")
    assert residency.load_s("a") == 90.0
    assert [residency.retry_after_s("a", 91.0, patience_s) for patience_s in (0.0, 59.5, 100.0)] == [90, 31, 1]


def test_model_whose_failures_are_forgotten_is_tried_at_once_and_then_as_after_its_first_one() -> None:
    residency = Residency(CAPACITY, [ModelNeeds("a", {"cpu": 100}, is_kept=True)])
    for now_s in (0.0, FIRST_BACKOFF_S):
        assert residency.plan(now_s) == [Load("a")]
        residency.load_failed("a", now_s)
    assert residency.plan(FIRST_BACKOFF_S + 1.0) == []
    residency.forget_failures("a")
    assert residency.state("a") is State.COLD and residency.plan(FIRST_BACKOFF_S + 1.0) == [Load("a")]
    residency.load_failed("a", 10.0)
    assert residency.retry_s("a") == 10.0 + FIRST_BACKOFF_S


def test_removed_model_is_forgotten() -> None:
    residency = Residency(CAPACITY, on_cpu("a"))
    residency.remove("a")
    with pytest.raises(KeyError):
        residency.state("a")


class Simulation:
    """Random requests, loads that may fail, and uses, in virtual time. Checks what must always be true."""

    def __init__(self, seed: int) -> None:
        self.random = choose = random.Random(seed)
        devices = ["cpu", "cuda:0", "cuda:1"][: choose.randint(1, 3)]
        self.capacity = dict.fromkeys(devices, 100)
        self.needs = {}
        kept_memory = dict.fromkeys(devices, 0)
        for number in range(choose.randint(2, 7)):
            memory = {each: choose.randint(1, 60) for each in choose.sample(devices, choose.randint(1, len(devices)))}
            is_kept = choose.random() < 0.2 and all(kept_memory[each] + need <= 40 for each, need in memory.items())
            for each, need in memory.items():
                kept_memory[each] += need * is_kept
            name = f"m{number}"
            self.needs[name] = ModelNeeds(name, memory, is_kept)
        self.residency = Residency(self.capacity, self.needs.values())
        self.now_s = 0.0
        self.in_work: list[tuple[float, Load | Unload]] = []
        self.uses: list[tuple[float, str, str | None]] = []
        self.waiting: dict[str, float] = {}  # since when
        self.may_fail = True
        self.longest_wait_s = 0.0

    def step(self, asks: bool) -> None:
        choose, residency = self.random, self.residency
        self.now_s += choose.expovariate(2.0)
        for item in [each for each in self.in_work if each[0] <= self.now_s]:
            self.in_work.remove(item)
            self._done(item[1])
        for use in [each for each in self.uses if each[0] <= self.now_s]:
            self.uses.remove(use)
            residency.end_use(use[1], self.now_s, use[2])
        if asks:
            name, tenant = choose.choice(list(self.needs)), choose.choice(("search", "law", None))
            if residency.begin_use(name, self.now_s, tenant):
                self._use(name, tenant)
            elif residency.retry_s(name) <= self.now_s:
                residency.mark_requested(name, self.now_s, tenant)
                self.waiting.setdefault(name, self.now_s)
            if self.waiting and choose.random() < 0.05:
                left = choose.choice(list(self.waiting))
                del self.waiting[left]
                residency.clear_requested(left)
            if choose.random() < 0.05:
                residency.dismiss(choose.choice(list(self.needs)))
        self._look()
        self._check()

    def _use(self, name: str, tenant: str | None) -> None:
        self.uses.append((self.now_s + self.random.expovariate(0.3), name, tenant))

    def _done(self, action: Load | Unload) -> None:
        name, residency = action.name, self.residency
        if isinstance(action, Unload):
            residency.unloaded(name)
        elif self.may_fail and self.random.random() < 0.1:
            residency.load_failed(name, self.now_s)
            self.waiting.pop(name, None)
        else:
            residency.loaded(name, self.now_s)
            if name in self.waiting:
                residency.mark_requested(name, self.now_s)

    def _look(self) -> None:
        for action in self.residency.plan(self.now_s):
            if isinstance(action, Admit):
                since_s = self.waiting.pop(action.name, None)
                assert since_s is not None or self.needs[action.name].is_kept
                self.longest_wait_s = max(
                    self.longest_wait_s, self.now_s - (self.now_s if since_s is None else since_s)
                )
                self.residency.add_use(action.name, self.now_s)
                self._use(action.name, None)
                continue
            if isinstance(action, Unload):
                assert action.name not in {name for _, name, _ in self.uses}, "it is used"
            self.in_work.append((self.now_s + self.random.expovariate(0.5), action))

    def _check(self) -> None:
        residency = self.residency
        for device in self.capacity:
            assert residency.free(device) >= 0, "more memory is held than there is"
        for name in self.needs:
            uses = sum(each == name for _, each, _ in self.uses)
            assert residency.num_uses(name) == uses
            assert not uses or residency.state(name) in (State.READY, State.UNLOADING)


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_never_overcommitted_and_whoever_waits_is_served_at_last(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(150):
        simulation.step(asks=True)
    simulation.may_fail = False
    for _ in range(450):  # models are used without end, and yet those that wait get their turns
        simulation.step(asks=True)
    waits_s = [simulation.now_s - since_s for since_s in simulation.waiting.values()]
    # Each model before it has its turn, is used for some seconds more, is unloaded, and the next one is loaded.
    assert max(simulation.longest_wait_s, *waits_s, 0.0) < len(simulation.needs) * 3 * TURN_S


def test_new_needs_of_a_model_apply_when_it_holds_no_memory_and_a_new_capacity_at_once() -> None:
    residency = Residency({"cpu": 100}, on_cpu("a"))
    loaded(residency, ["a"])
    assert residency.is_settled
    residency.replace(ModelNeeds("a", {"cpu": 30}, is_kept=True))
    residency.set_capacity({"cpu": 120})
    assert residency.free("cpu") == 20, "it holds what it was loaded with"
    residency.failing("a")
    residency.lost("a", 5.0)
    assert residency.free("cpu") == 120 and residency.is_settled
    assert residency.plan(5.0 + FIRST_BACKOFF_S) == [Load("a")], "it is kept now"
    assert residency.free("cpu") == 90


def test_measured_memory_takes_the_place_of_the_estimate_and_idle_models_make_room_for_what_is_too_much() -> None:
    residency = Residency({"cpu": 100}, on_cpu("a", "b", "c", memory=30))
    loaded(residency, ["a", "b", "c"])
    residency.measured("c", {"cpu": 50})
    assert residency.free("cpu") == -10 and not residency.is_settled
    assert residency.plan(11.0) == [Unload("a")], "the one that was used least recently"
    residency.unloaded("a")
    assert residency.free("cpu") == 20 and residency.is_settled
    residency.mark_requested("a", 12.0)
    assert residency.plan(12.0) == [Unload("b")], "there is no room for three any more"
    residency.unloaded("b")
    assert residency.plan(12.0) == [Load("a")]


def test_model_that_takes_more_than_there_is_can_be_loaded_again() -> None:
    needs = [ModelNeeds("kept", {"cpu": 40}, is_kept=True), ModelNeeds("a", {"cpu": 10})]
    residency = Residency({"cpu": 100}, needs)
    loaded(residency, ["kept", "a"])
    residency.measured("a", {"cpu": 500})
    assert residency.memory("a") == {"cpu": 60} and residency.plan(11.0) == []
    residency.dismiss("a")
    assert residency.plan(11.0) == [Unload("a")]
    residency.unloaded("a")
    residency.mark_requested("a", 12.0)
    assert residency.plan(12.0) == [Load("a")]


def test_new_needs_of_the_file_outlive_a_measurement_of_the_old_ones() -> None:
    residency = Residency({"cpu": 100}, on_cpu("a", memory=30))
    loaded(residency, ["a"])
    residency.replace(ModelNeeds("a", {"cpu": 70}))
    residency.measured("a", {"cpu": 20})
    assert residency.free("cpu") == 80
    residency.dismiss("a")
    residency.plan(11.0)
    residency.unloaded("a")
    assert residency.memory("a") == {"cpu": 70}


def test_measurement_that_a_new_file_repeats_is_limited_too() -> None:
    needs = [ModelNeeds("kept", {"cpu": 40}, is_kept=True), ModelNeeds("a", {"cpu": 10})]
    residency = Residency({"cpu": 100}, needs)
    loaded(residency, ["kept", "a"])
    residency.measured("a", {"cpu": 500})
    residency.replace(ModelNeeds("a", {"cpu": 10}, measured={"cpu": 500}))
    residency.dismiss("a")
    assert residency.plan(11.0) == [Unload("a")]
    residency.unloaded("a")
    residency.mark_requested("a", 12.0)
    assert residency.plan(12.0) == [Load("a")]


def test_kept_models_that_take_more_than_they_were_placed_with_lock_no_other_model_out() -> None:
    kept = [ModelNeeds(name, {"cpu": 25}, is_kept=True) for name in ("k1", "k2")]
    residency = Residency({"cpu": 100}, [*kept, *on_cpu("a", "b", memory=50)])
    assert residency.plan(0.0) == [Load("k1"), Load("k2")]
    for name in ("k1", "k2"):
        residency.loaded(name, 1.0)
        residency.measured(name, {"cpu": 80})
    assert residency.is_settled and residency.memory("k1") == {"cpu": 25}
    residency.mark_requested("a", 5.0)
    assert residency.plan(5.0) == [Load("a")]
    residency.loaded("a", 6.0)
    residency.failing("k2")
    residency.lost("k2", 7.0)
    assert residency.plan(7.0 + FIRST_BACKOFF_S) == [Load("k2")]
    residency.loaded("k2", 13.0)
    residency.mark_requested("b", 20.0)
    assert residency.plan(20.0) == [Unload("a")], "those on demand take turns"
    residency.unloaded("a")
    assert residency.plan(21.0) == [Load("b")]


def test_kept_model_counts_for_less_if_it_takes_less() -> None:
    residency = Residency({"cpu": 100}, [ModelNeeds("kept", {"cpu": 40}, is_kept=True), *on_cpu("a", "b", memory=40)])
    loaded(residency, ["kept"])
    residency.measured("kept", {"cpu": 20})
    loaded(residency, ["a", "b"])
    assert residency.free("cpu") == 0


def test_model_has_room_beside_a_kept_one_that_still_holds_what_an_older_file_said() -> None:
    residency = Residency({"cpu": 100}, [ModelNeeds("kept", {"cpu": 70}, is_kept=True), *on_cpu("used", memory=20)])
    loaded(residency, ["kept", "used"])
    residency.replace(ModelNeeds("kept", {"cpu": 40}, is_kept=True))
    residency.add(ModelNeeds("new", {"cpu": 60}))
    residency.mark_requested("new", 5.0)
    assert residency.plan(5.0) == [Unload("used")]
    residency.unloaded("used")
    assert residency.plan(6.0) == [Load("new")]
