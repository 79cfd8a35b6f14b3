"""Choose the device of each model of a server, and describe what each device holds. This is pure.

Models that are loaded on demand share devices (cost): each one gets the device on which the other models need least of
the shared memory. Models that stay loaded (latency) are spread, so that each has as much of a device as possible; a
dedicated model has its devices to itself. If there is no room for a model then, those that stay loaded are packed as
tightly as possible instead. Large models are placed before small ones. The choice depends only on the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from servekit.errors import ConfigError

Keep = Literal["always", "on_demand", "dedicated"]

_ORDER: Mapping[Keep, int] = {"dedicated": 0, "always": 1, "on_demand": 2}  # in which models are placed
_WORDS: Mapping[Keep, str] = {"dedicated": "dedicated", "always": "always loaded", "on_demand": "on demand"}


class Workers(Struct, frozen=True, kw_only=True):
    """The workers of one model: how many there are, and what each of them takes."""

    name: str
    keep: Keep
    memory_bytes: int  # of one worker
    num_replicas: int = 1
    num_ranks: int = 1  # of each replica; each of them needs a device of its own, unless that is a CPU
    devices: Sequence[str] = ()  # of each rank of each replica; empty until they are chosen

    @property
    def num_workers(self) -> int:
        return self.num_replicas * self.num_ranks

    @property
    def memory(self) -> dict[str, int]:
        """What all workers take together, in bytes, by device."""
        return {device: self.memory_bytes * self.devices.count(device) for device in dict.fromkeys(self.devices)}


class DeviceUse(Struct, frozen=True, kw_only=True):
    """What one device holds."""

    device: str
    memory_bytes: int | None  # for models; None: no limit
    models: Sequence[Workers]

    @property
    def kept_bytes(self) -> int:
        """What the models take that stay loaded."""
        return sum(each.memory[self.device] for each in self.models if each.keep != "on_demand")

    @property
    def shared_bytes(self) -> int | None:
        """What is left for models on demand; None: no limit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.kept_bytes

    @property
    def on_demand_bytes(self) -> int:
        """What the models on demand would take together. If it is more than `shared_bytes`, they take turns."""
        return sum(each.memory[self.device] for each in self.models if each.keep == "on_demand")

    def lines(self) -> list[str]:
        """Say so in a line for the device and one for each model."""
        limit = "no limit" if self.memory_bytes is None else _bytes(self.memory_bytes)
        shared = self.shared_bytes
        text = f"{self.device}: {limit}; {_bytes(self.kept_bytes)} stay loaded"
        if self.on_demand_bytes:
            left = "" if shared is None else f", {_bytes(shared)} are shared"
            turns = " and take turns" if shared is not None and self.on_demand_bytes > shared else ""
            text += f"{left} by models on demand that take {_bytes(self.on_demand_bytes)}{turns}"
        found = [text]
        for each in self.models:
            number = each.devices.count(self.device)
            times = f" ({number} workers)" if number > 1 else ""
            found.append(f"  {each.name}: {_bytes(each.memory[self.device])}{times}, {_WORDS[each.keep]}")
        return found


def place(
    models: Sequence[Workers], capacity: Mapping[str, int], candidates: Mapping[str, Sequence[str]]
) -> list[Workers]:
    """Return the models, each with its devices.

    `capacity` is the memory for models of each device, and `candidates` has the devices among which those of a model
    are chosen, by its name: all of them have a capacity. Raises ConfigError if there is no room for one of them.
    """
    try:
        return _place(models, capacity, candidates, is_spread=True)
    except ConfigError as error:
        try:
            return _place(models, capacity, candidates, is_spread=False)
        except ConfigError:
            raise error from None


def device_uses(models: Sequence[Workers], capacity: Mapping[str, int]) -> list[DeviceUse]:
    """Return what each device holds: those with a capacity, and all others that models use."""
    devices = dict.fromkeys((*capacity, *(device for each in models for device in each.devices)))
    return [
        DeviceUse(
            device=device,
            memory_bytes=capacity.get(device),
            models=[each for each in models if device in each.devices],
        )
        for device in devices
    ]


def check_dedicated(models: Sequence[Workers]) -> None:
    """Raise ConfigError if a dedicated model shares a device."""
    for use in device_uses(models, {}):
        dedicated = next((each.name for each in use.models if each.keep == "dedicated"), None)
        others = [each.name for each in use.models if each.name != dedicated]
        if dedicated is not None and others:
            raise ConfigError(
                f"the model {dedicated!r} is dedicated, so no other model may be on {use.device}, and {others[0]!r} "
                "is; give one of them another device, or set keep = 'always'"
            )


class _Room:
    """What is left of each device while models are placed."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self._capacity = capacity
        self._kept = dict.fromkeys(capacity, 0)
        self._demanded = dict.fromkeys(capacity, 0)  # by models on demand
        self._dedicated: set[str] = set()
        self._used: set[str] = set()

    def take(self, model: Workers) -> None:
        """Count a model that has its devices."""
        for device, need in model.memory.items():
            if device in self._capacity:
                (self._demanded if model.keep == "on_demand" else self._kept)[device] += need
        self._used.update(model.devices)
        if model.keep == "dedicated":
            self._dedicated.update(model.devices)

    def choose(self, model: Workers, candidates: Sequence[str], is_spread: bool) -> list[str]:
        """Return the devices of all workers. Raises ConfigError."""
        chosen: list[str] = []
        for _ in range(model.num_replicas):
            replica: list[str] = []
            for _ in range(model.num_ranks):
                others = [*chosen, *replica]
                fit = [device for device in candidates if self._fits(model, device, others, replica)]
                if not fit:
                    raise self._no_room(model, candidates)
                replica.append(min(fit, key=lambda device: self._cost(model, device, others, is_spread)))
            chosen += replica
        return chosen

    def _left(self, model: Workers, device: str, others: Sequence[str]) -> int:
        """What models that stay loaded leave, and the other workers of this one."""
        return self._capacity[device] - self._kept[device] - others.count(device) * model.memory_bytes

    def _fits(self, model: Workers, device: str, others: Sequence[str], replica: Sequence[str]) -> bool:
        if device in self._dedicated or (device in replica and device != "cpu"):
            return False
        if model.keep == "dedicated" and (device in self._used or (device in others and device != "cpu")):
            return False
        return self._left(model, device, others) >= model.memory_bytes

    def _cost(self, model: Workers, device: str, others: Sequence[str], is_spread: bool) -> tuple[float, ...]:
        """What is least for the best device: of equal ones, the first."""
        left = self._left(model, device, others)
        if model.keep == "dedicated":
            return (left,)
        if model.keep == "always":
            return (others.count(device), -left) if is_spread else (left,)
        return (others.count(device), (self._demanded[device] + model.memory_bytes) / max(1, left))

    def _no_room(self, model: Workers, candidates: Sequence[str]) -> ConfigError:
        left = ", ".join(f"{device} has {self._left(model, device, [])}" for device in candidates)
        own = " without another model" if model.keep == "dedicated" else ""
        number = f"each of its {model.num_workers} workers" if model.num_workers > 1 else "it"
        return ConfigError(
            f"there is no device{own} for the model {model.name!r}: {number} takes {model.memory_bytes} bytes, and "
            f"models that stay loaded leave {left}; give more in [memory], or set keep = 'on_demand' for some"
        )


def _place(
    models: Sequence[Workers], capacity: Mapping[str, int], candidates: Mapping[str, Sequence[str]], is_spread: bool
) -> list[Workers]:
    room, placed = _Room(capacity), {each.name: each for each in models}
    for model in models:
        if model.devices:
            room.take(model)
    left = [each for each in models if not each.devices]
    for model in sorted(left, key=lambda each: (_ORDER[each.keep], -each.memory_bytes)):
        devices = room.choose(model, candidates[model.name], is_spread)
        placed[model.name] = replace(model, devices=devices)
        room.take(placed[model.name])
    return list(placed.values())


def _bytes(number: int) -> str:
    """Return a number of bytes for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number} bytes"
