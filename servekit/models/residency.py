"""Decide which models are loaded: which one is loaded next, and which ones are unloaded for it.

Each model needs memory on some devices. Models that requests name wait in a queue, in the order in which they were
first named. A waiting model may only be overtaken by one that needs none of the same devices. If there is not enough
memory for it, the models that were used least recently are unloaded; never one in use, and never one with `is_kept`.

A model that is always in use would never be unloaded. So when a model has waited for TURN_S, and the models that hold
its memory have been loaded for as long, the least recently used of these are *closed*: requests that name a closed
model wait in the queue, too. When its last use has ended, it is unloaded.

A tenant's request evicts the models that others work with, which another tenant uses or has used within RECENT_S, only
if all the rest would not be enough: so a tenant that names cold models in turn evicts its own ones. If these are used,
it waits until they have had their turns, even where a model of others is idle.

A measurement of a model's memory replaces the estimate. But the models were placed with the estimates, and each of them
must be able to load together with those with `is_kept`, whatever is measured later. So a model with `is_kept` counts at
most as its estimate, and any other one at most as the memory that those leave.

This is pure: times are arguments, and the caller executes what `plan` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import ceil, inf

from msgspec import Struct
from msgspec.structs import replace

TURN_S = 10.0  # that a model may be used by others while one waits for its memory
RECENT_S = 60.0  # after its last use by a tenant, this one still counts as working with the model
DEFAULT_LOAD_S = 30.0  # that a model takes to load, before it was measured
FIRST_BACKOFF_S = 5.0  # after a model could not be loaded; doubled after each further failure
MAX_BACKOFF_S = 300.0
UNLIMITED = 2**63


class State(StrEnum):
    """What a model does."""

    COLD = "cold"  # not loaded
    WAITING = "waiting"  # for its turn to be loaded
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"  # could not be loaded, and is tried again at `retry_s` at the earliest


class ModelNeeds(Struct, frozen=True):
    """The memory that a model takes on each device, in bytes, and whether it stays loaded."""

    name: str
    memory: Mapping[str, int] = {}  # what it was placed with: an estimate, or what the file says
    is_kept: bool = False
    measured: Mapping[str, int] = {}  # on the same devices, when it was loaded last


class Load(Struct, frozen=True):
    """Load this model."""

    name: str


class Unload(Struct, frozen=True):
    """Unload this model, which is not used."""

    name: str


class Admit(Struct, frozen=True):
    """Let waiting requests use this model: it is loaded."""

    name: str


Action = Load | Unload | Admit


class _Model:
    """One model, and what is known of it."""

    def __init__(self, needs: ModelNeeds) -> None:
        self.needs = needs
        self.next_needs = needs  # from when it holds no memory
        self.is_loaded = False
        self.is_changing = False  # it is being loaded or unloaded
        self.is_closed = False
        self.is_dismissed = False  # an operator wants it unloaded
        self.num_uses = 0
        self.num_uses_by = Counter[str]()  # of each tenant that uses it now
        self.used_s_by: dict[str, float] = {}  # by tenant, as `used_s`; the oldest first, old ones are forgotten
        self.is_admitted = False  # by the present plan, whose caller counts the uses next
        self.requested_s: float | None = None  # since when a request waits for it
        self.requested_by: str | None = None  # the tenant whose request was first to wait
        self.ready_s = -inf  # since when it is loaded
        self.used_s = -inf  # when its last use began or ended
        self.load_s: float | None = None  # what loading it took last; None: it was not measured yet
        self.load_began_s = 0.0
        self.num_failures = 0  # in a row
        self.retry_s = -inf

    @property
    def holds_memory(self) -> bool:
        return self.is_loaded or self.is_changing

    def settle(self) -> None:
        """Note that it may hold no memory any more."""
        if not self.holds_memory:
            self.needs = self.next_needs

    def note_use(self, tenant: str | None, now_s: float) -> None:
        """Note that a use of a tenant begins or ends; None: one of an operator."""
        self.used_s = now_s
        if tenant is None:
            return
        self.used_s_by.pop(tenant, None)
        self.used_s_by[tenant] = now_s
        while self.used_s_by[oldest := next(iter(self.used_s_by))] <= now_s - RECENT_S:
            del self.used_s_by[oldest]

    def others_until_s(self, tenant: str | None) -> float:
        """The time until which tenants other than this one work with it, if none begins a use: inf during one."""
        if any(each != tenant for each in self.num_uses_by):
            return inf
        used_s = (used_s for each, used_s in reversed(self.used_s_by.items()) if each != tenant)
        return next(used_s, -inf) + RECENT_S

    @property
    def is_idle(self) -> bool:
        """Whether it may be unloaded at once."""
        return self.is_loaded and not self.is_changing and not self.num_uses and not self.is_admitted


class Residency:
    """Which models are loaded, and which ones wait. All methods that take a time need times that never go back."""

    def __init__(self, capacity: Mapping[str, int], models: Iterable[ModelNeeds] = ()) -> None:
        """`capacity` is the memory for models of each device, in bytes; devices that are not in it have no limit."""
        self.assumed_load_s = DEFAULT_LOAD_S
        self._capacity = capacity
        self._models: dict[str, _Model] = {}
        for needs in models:
            self.add(needs)

    def add(self, needs: ModelNeeds) -> None:
        """Add a model, which is cold."""
        self._models[needs.name] = _Model(needs)

    def replace(self, needs: ModelNeeds) -> None:
        """Change what a model needs: its memory when it holds none, and whether it stays loaded at once."""
        model = self._models[needs.name]
        model.next_needs = needs
        model.needs = replace(model.needs, is_kept=needs.is_kept)
        model.settle()

    def set_capacity(self, capacity: Mapping[str, int]) -> None:
        """Change the memory for models of each device. If models hold more, those that are idle are unloaded."""
        self._capacity = capacity

    def remove(self, name: str) -> None:
        """Forget a model, which is cold and not waited for."""
        assert not self._models[name].holds_memory
        del self._models[name]

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self, name: str) -> State:
        """What a model does."""
        model = self._models[name]
        if model.is_changing:
            return State.UNLOADING if model.is_loaded else State.LOADING
        if model.is_loaded:
            return State.UNLOADING if model.is_dismissed else State.READY
        if model.requested_s is not None:
            return State.WAITING
        return State.FAILED if model.num_failures else State.COLD

    def num_uses(self, name: str) -> int:
        """How many use a model."""
        return self._models[name].num_uses

    def retry_s(self, name: str) -> float:
        """The time before which a model that could not be loaded is not tried again."""
        return self._models[name].retry_s

    def load_s(self, name: str) -> float:
        """What loading a model takes: what it took last, or what is assumed before it was measured."""
        return self._load_s(self._models[name])

    def _load_s(self, model: _Model) -> float:
        return self.assumed_load_s if model.load_s is None else model.load_s

    def forget_failures(self, name: str) -> None:
        """Let a model that has failed be tried again at once, and then as after its first failure."""
        model = self._models[name]
        model.num_failures, model.retry_s = 0, -inf

    def memory(self, name: str) -> Mapping[str, int]:
        """What counts as held by a model on each device, or will when it is loaded."""
        model = self._models[name]
        return {device: self._need(model, device) for device in model.needs.memory}

    def free(self, device: str) -> float:
        """The memory of a device that no model holds; infinite without a limit."""
        left = self._left_by_kept(device)
        held = sum(_counted(each, device, left) for each in self._models.values() if each.holds_memory)
        return self._capacity.get(device, inf) - held

    def position(self, name: str) -> int:
        """How many models are loaded before this one, with itself: 1 for the next one; 0 if it does not wait."""
        model = self._models[name]
        if model.requested_s is None or model.is_changing:
            return 0
        line = self._line()
        return 1 + sum(_share_devices(each, model) for each in line[: line.index(model)])

    def expected_wait_s(self, name: str, now_s: float) -> float:
        """An estimate of the time until a model is loaded that is named now: the times to load those before it."""
        model = self._models[name]
        if model.is_loaded and not model.is_changing and not model.is_closed:
            return 0.0
        wait_s = 0.0 if self._is_loading(model) else self._load_s(model)
        line = self._line()
        before = line[: line.index(model)] if model in line else line
        for each in self._models.values():
            if self._is_loading(each) and (each is model or _share_devices(each, model)):
                wait_s += max(0.0, each.load_began_s + self._load_s(each) - now_s)
        wait_s += sum(self._load_s(each) for each in before if _share_devices(each, model) and not each.is_changing)
        return max(wait_s, model.retry_s - now_s)

    def retry_after_s(self, name: str, now_s: float, patience_s: float = 0.0) -> int:
        """Whole seconds after which a request for a model should come again that was refused now.

        It may then wait for `patience_s` more.
        """
        return max(1, ceil(self.expected_wait_s(name, now_s) - patience_s))

    @property
    def is_settled(self) -> bool:
        """Whether `plan` has nothing to do, whatever uses end."""
        is_quiet = all(each.requested_s is None and not each.is_dismissed for each in self._models.values())
        return is_quiet and not self._overcommitted()

    def next_s(self, now_s: float) -> float:
        """The time at which `plan` may return something although nothing has been reported; inf if there is none."""
        times = [each.retry_s for each in self._models.values() if each.needs.is_kept and not each.holds_memory]
        for waiting in self._line():
            candidates = self._eviction_candidates(waiting)
            times += [self._turn_ends_s(waiting, each) for each in candidates if not each.is_closed]
            times += [each.others_until_s(waiting.requested_by) for each in candidates]
        return min((time_s for time_s in times if time_s > now_s), default=inf)

    @staticmethod
    def _is_loading(model: _Model) -> bool:
        return model.is_changing and not model.is_loaded

    def _line(self) -> list[_Model]:
        """The models that wait, in order of their turns."""
        waiting = [each for each in self._models.values() if each.requested_s is not None and not each.is_changing]
        return sorted(waiting, key=lambda each: each.requested_s or 0.0)

    # -- what happens -------------------------------------------------------------------------------------------------

    def mark_requested(self, name: str, now_s: float, tenant: str | None = None) -> None:
        """Note that a request of a tenant waits for a model; None: one of an operator."""
        model = self._models[name]
        if model.requested_s is None:
            model.requested_s = now_s
            if not self._is_loading(model):  # it is loaded for the tenant that was the first
                model.requested_by = tenant

    def clear_requested(self, name: str) -> None:
        """Note that no request waits for a model any more."""
        self._models[name].requested_s = None

    def begin_use(self, name: str, now_s: float, tenant: str | None = None) -> bool:
        """Use a model at once, if it is loaded and not closed. Returns whether that was so."""
        model = self._models[name]
        if not model.is_loaded or model.is_changing or model.is_closed or model.is_dismissed:
            return False
        self.add_use(name, now_s, tenant)
        return True

    def add_use(self, name: str, now_s: float, tenant: str | None = None) -> None:
        """Count a use of a model that `plan` has admitted."""
        model = self._models[name]
        assert model.is_loaded and not model.is_changing
        model.num_uses += 1
        if tenant is not None:
            model.num_uses_by[tenant] += 1
        model.note_use(tenant, now_s)

    def end_use(self, name: str, now_s: float, tenant: str | None = None) -> None:
        """Note that a use of a tenant has ended."""
        model = self._models[name]
        model.num_uses -= 1
        assert model.num_uses >= 0
        if tenant is not None:
            model.num_uses_by[tenant] -= 1
            assert model.num_uses_by[tenant] >= 0
            if not model.num_uses_by[tenant]:
                del model.num_uses_by[tenant]
        model.note_use(tenant, now_s)

    def loaded(self, name: str, now_s: float) -> None:
        """Note that a model that was being loaded is ready."""
        model = self._models[name]
        assert self._is_loading(model)
        model.is_changing, model.is_loaded, model.is_closed = False, True, False
        model.num_failures, model.retry_s = 0, -inf
        model.ready_s = now_s
        model.note_use(model.requested_by, now_s)
        model.load_s = now_s - model.load_began_s

    def measured(self, name: str, memory: Mapping[str, int]) -> None:
        """Count from now on what a loaded model really takes, in the place of an estimate, as far as that may count."""
        model = self._models[name]
        assert model.is_loaded
        if model.next_needs.memory == model.needs.memory:  # not changed in the file meanwhile
            model.next_needs = replace(model.next_needs, measured=memory)
        model.needs = replace(model.needs, measured=memory)

    def load_failed(self, name: str, now_s: float) -> None:
        """Note that a model could not be loaded. No request waits for it any more."""
        self._fail(self._models[name], now_s)

    def failing(self, name: str) -> None:
        """Note that a loaded model has failed, and is being unloaded. Its uses do not end: `lost` forgets them."""
        model = self._models[name]
        assert model.is_loaded and not model.is_changing
        model.is_changing = True

    def lost(self, name: str, now_s: float) -> None:
        """Note that a failed model is unloaded."""
        model = self._models[name]
        model.num_uses = 0
        model.num_uses_by.clear()
        self._fail(model, now_s)

    def _fail(self, model: _Model, now_s: float) -> None:
        model.is_loaded = model.is_changing = model.is_closed = model.is_dismissed = False
        model.settle()
        model.num_failures += 1
        model.requested_s = None
        model.retry_s = now_s + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(model.num_failures - 1, 30))

    def unloaded(self, name: str) -> None:
        """Note that a model that was being unloaded holds no memory any more."""
        model = self._models[name]
        assert model.is_loaded and model.is_changing
        model.is_loaded = model.is_changing = model.is_closed = model.is_dismissed = False
        model.settle()

    def dismiss(self, name: str) -> None:
        """Note that an operator wants a model to be unloaded when its last use has ended."""
        model = self._models[name]
        model.is_dismissed = model.is_loaded

    # -- decisions ----------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> list[Action]:
        """Return what to do now, and count it as begun.

        The caller reports `loaded`, `load_failed` or `unloaded` when it is done.
        """
        for model in self._models.values():
            model.is_admitted = False
            if model.needs.is_kept and not model.holds_memory and model.requested_s is None and now_s >= model.retry_s:
                model.requested_s, model.requested_by = now_s, None
        dismissed = [each for each in self._models.values() if each.is_dismissed and each.is_idle]
        actions: list[Action] = [self._begin_unloading(each) for each in dismissed]
        self._close(now_s)
        blocked: set[str] = set()
        line = self._line()
        for model in line:
            if model.is_loaded and not model.is_closed and not model.is_dismissed:
                model.requested_s, model.is_admitted = None, True
                actions.append(Admit(model.needs.name))
        for model in line:
            if model.is_loaded:
                continue
            if blocked.isdisjoint(model.needs.memory):
                if self._fits(model, {}):
                    model.is_changing, model.load_began_s = True, now_s
                    model.requested_s = None
                    actions.append(Load(model.needs.name))
                    continue
                actions += [self._begin_unloading(each) for each in self._victims(model, now_s)]
            blocked |= model.needs.memory.keys()
        return actions + [self._begin_unloading(each) for each in self._excess()]

    def _excess(self) -> list[_Model]:
        """Return the idle models that have to go because a device holds more than it has: those used least recently.

        That happens when a model takes more than was estimated, or the file gives less memory than before.
        """
        found: list[_Model] = []
        for device in self._overcommitted():
            unloading = (each for each in self._models.values() if (each.is_changing and each.is_loaded))
            free = self.free(device) + sum(self._need(each, device) for each in (*unloading, *found))
            for each in sorted(self._models.values(), key=lambda each: each.used_s):
                need = self._need(each, device)
                is_free_to_go = each.is_idle and not each.needs.is_kept and each.requested_s is None
                if free < 0 and need and is_free_to_go and each not in found:
                    found.append(each)
                    free += need
        return found

    def _overcommitted(self) -> list[str]:
        return [device for device in self._capacity if self.free(device) < 0]

    @staticmethod
    def _begin_unloading(model: _Model) -> Unload:
        model.is_changing = True
        return Unload(model.needs.name)

    def _left_by_kept(self, device: str, beside: _Model | None = None) -> int:
        """What the models that stay loaded leave of a device; `beside` is not counted."""
        kept = (each for each in self._models.values() if each.needs.is_kept and each is not beside)
        return self._capacity.get(device, UNLIMITED) - sum(_counted(each, device, 0) for each in kept)

    def _need(self, model: _Model, device: str) -> int:
        """What counts as taken by a model on a device."""
        return _counted(model, device, self._left_by_kept(device))

    def _lacking(self, model: _Model, freed: Mapping[str, int]) -> list[str]:
        """Return the devices on which a model has no room when this much more is free on each.

        It has room where no other model is that may be unloaded, also if those that stay loaded hold more than they
        will: what the file said of them before.
        """
        return [
            device
            for device in model.needs.memory
            if min(self._need(model, device), self._left_by_kept(device, model))
            > self.free(device) + freed.get(device, 0)
        ]

    def _fits(self, model: _Model, freed: Mapping[str, int]) -> bool:
        """Whether a model has room when this much more is free on each device."""
        return not self._lacking(model, freed)

    def _eviction_order(self, model: _Model, freed: Mapping[str, int], now_s: float) -> list[_Model]:
        """Return the loaded models that may make room for one, used or not: those used least recently first.

        Those that others work with come last, and not at all if the rest would be enough when it has had its turns.
        `freed` is what will be free on each device without any of them.
        """
        tenant, in_order = model.requested_by, sorted(self._eviction_candidates(model), key=lambda each: each.used_s)
        rest = [each for each in in_order if now_s >= each.others_until_s(tenant)]
        loading = (each for each in self._models.values() if self._is_loading(each) and not each.needs.is_kept)
        without_rest = dict(freed)
        for each in (*rest, *(each for each in loading if each.requested_by == tenant)):
            self._add(without_rest, each)
        if self._fits(model, without_rest):
            return rest
        return [*rest, *(each for each in in_order if each not in rest)]

    def _victims(self, model: _Model, now_s: float) -> Sequence[_Model]:
        """Return the models that make room for one at once; none if that would not be enough.

        Memory of models that are already being unloaded counts as free.
        """
        freed: dict[str, int] = {}
        for each in self._models.values():
            if each.is_changing and each.is_loaded:
                self._add(freed, each)
        chosen: list[_Model] = []
        for each in self._eviction_order(model, freed, now_s):
            if self._fits(model, freed):
                break
            if each.is_idle and self._lacks(model, each, freed):
                chosen.append(each)
                self._add(freed, each)
        if not self._fits(model, freed):
            return ()
        for each in reversed(chosen[:-1]):  # a large one may have made room for smaller ones before it
            without = {device: freed.get(device, 0) - self._need(each, device) for device in freed}
            if self._fits(model, without):
                chosen.remove(each)
                freed = without
        return chosen

    def _lacks(self, model: _Model, victim: _Model, freed: Mapping[str, int]) -> bool:
        """Whether a victim holds memory on a device on which a model has no room yet."""
        return any(self._need(victim, device) for device in self._lacking(model, freed))

    def _add(self, freed: dict[str, int], model: _Model) -> None:
        for device in model.needs.memory:
            freed[device] = freed.get(device, 0) + self._need(model, device)

    def _eviction_candidates(self, model: _Model) -> list[_Model]:
        """The loaded models that may make room for one, used or not."""
        return [
            each
            for each in self._models.values()
            if each.is_loaded and not each.is_changing and not each.needs.is_kept and _share_devices(each, model)
        ]

    def _close(self, now_s: float) -> None:
        """Close the models that have to make room for those whose turn it is, and open all others."""
        closed: list[_Model] = []
        blocked: set[str] = set()
        for model in self._line():
            if model.is_loaded or not blocked.isdisjoint(model.needs.memory):
                continue
            blocked |= model.needs.memory.keys()
            closed += self._to_close(model, now_s)
        for model in self._models.values():
            model.is_closed = model in closed

    def _to_close(self, model: _Model, now_s: float) -> list[_Model]:
        """Return the models that make room for one, as far as they have had their turns; none if it needs none."""
        freed: dict[str, int] = {}
        for each in self._models.values():
            if each.is_changing and each.is_loaded:
                self._add(freed, each)
        chosen: list[_Model] = []
        # Those that were closed before come first, so that the choice stays the same while their uses end.
        in_order = self._eviction_order(model, freed, now_s)
        for each in sorted(in_order, key=lambda each: not each.is_closed):
            if self._fits(model, freed):
                break
            if self._lacks(model, each, freed) and (each.is_idle or now_s >= self._turn_ends_s(model, each)):
                chosen.append(each)
                self._add(freed, each)
        return [each for each in chosen if not each.is_idle or each.is_closed] if self._fits(model, freed) else []

    @staticmethod
    def _turn_ends_s(waiting: _Model, used: _Model) -> float:
        return max(waiting.requested_s or 0.0, used.ready_s) + TURN_S


def _counted(model: _Model, device: str, left: int) -> int:
    """Return what counts as taken by a model on a device. `left` is what the models that stay loaded leave of it."""
    placed = model.needs.memory.get(device, 0)
    taken = model.needs.measured.get(device, placed)
    return min(taken, placed if model.needs.is_kept else max(0, left))


def _share_devices(one: _Model, other: _Model) -> bool:
    return not one.needs.memory.keys().isdisjoint(other.needs.memory.keys())
