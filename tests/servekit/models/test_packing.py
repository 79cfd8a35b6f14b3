"""Which device each model gets."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from servekit.errors import ConfigError
from servekit.models.packing import Keep, Workers, check_dedicated, device_uses, place

GPUS = ("cuda:0", "cuda:1")
CAPACITY = dict.fromkeys(GPUS, 80)


def workers(name: str, keep: Keep, memory_bytes: int, devices: Sequence[str] = (), **numbers: int) -> Workers:
    return Workers(name=name, keep=keep, memory_bytes=memory_bytes, devices=devices, **numbers)


def placed(models: Sequence[Workers], capacity: dict[str, int] = CAPACITY) -> dict[str, list[str]]:
    found = place(models, capacity, {each.name: list(capacity) for each in models})
    return {each.name: list(each.devices) for each in found}


def test_models_that_stay_loaded_are_spread_and_replicas_get_devices_of_their_own() -> None:
    assert placed([workers("a", "always", 30), workers("b", "always", 40)]) == {"b": ["cuda:0"], "a": ["cuda:1"]}
    assert placed([workers("a", "always", 20, num_replicas=2)]) == {"a": ["cuda:0", "cuda:1"]}
    assert placed([workers("a", "always", 40, num_replicas=3)]) == {"a": ["cuda:0", "cuda:1", "cuda:0"]}


def test_ranks_of_a_replica_are_on_different_gpus() -> None:
    assert placed([workers("a", "always", 20, num_ranks=2)]) == {"a": ["cuda:0", "cuda:1"]}
    with pytest.raises(ConfigError, match="each of its 3 workers takes 20 bytes"):
        placed([workers("a", "always", 20, num_ranks=3)])


def test_models_that_stay_loaded_are_packed_tightly_if_a_large_one_has_no_room_otherwise() -> None:
    models = [workers("a", "always", 30), workers("b", "always", 30), workers("large", "on_demand", 70)]
    assert placed(models) == {"a": ["cuda:0"], "b": ["cuda:0"], "large": ["cuda:1"]}


def test_model_on_demand_goes_where_the_others_demand_least() -> None:
    models = [workers("kept", "always", 60), *(workers(name, "on_demand", 20) for name in "abcde")]
    found = placed(models)
    assert found["kept"] == ["cuda:0"] and sum(found[name] == ["cuda:0"] for name in "abcde") == 1


def test_dedicated_model_has_its_devices_to_itself() -> None:
    found = placed([workers("a", "on_demand", 5), workers("own", "dedicated", 10), workers("b", "always", 5)])
    assert found == {"own": ["cuda:0"], "a": ["cuda:1"], "b": ["cuda:1"]}
    with pytest.raises(ConfigError, match="no device without another model for the model 'own'"):
        placed([workers("own", "dedicated", 10, num_replicas=2), workers("fixed", "always", 1, ["cuda:1"])])
    with pytest.raises(ConfigError, match=r"'own' is dedicated.*on cuda:0, and 'b' is"):
        check_dedicated([workers("own", "dedicated", 1, ["cuda:0"]), workers("b", "always", 1, ["cuda:0"])])


def test_device_says_what_stays_loaded_and_what_takes_turns() -> None:
    models = [workers("a", "always", 50, ["cuda:0"] * 2), workers("b", "on_demand", 30, ["cuda:0"])]
    first, second, other = device_uses(
        [*models, workers("c", "always", 2_000_000_000, ["cpu"])], {GPUS[0]: 120, GPUS[1]: 9}
    )
    assert (first.kept_bytes, first.shared_bytes, first.on_demand_bytes) == (100, 20, 30)
    assert first.lines() == [
        "cuda:0: 120 bytes; 100 bytes stay loaded, 20 bytes are shared by models on demand that take 30 bytes and take "
        "turns",
        "  a: 100 bytes (2 workers), always loaded",
        "  b: 30 bytes, on demand",
    ]
    assert second.lines() == ["cuda:1: 9 bytes; 0 bytes stay loaded"]
    assert other.lines() == ["cpu: no limit; 2.0 GB stay loaded", "  c: 2.0 GB, always loaded"]


@pytest.mark.parametrize("seed", range(20))
def test_no_device_gets_more_than_it_has_and_the_choice_is_always_the_same(seed: int) -> None:
    choose = random.Random(seed)
    capacity = {f"cuda:{number}": choose.randint(20, 100) for number in range(choose.randint(1, 5))}
    keeps: list[Keep] = ["always", "on_demand", "dedicated"]
    models = [
        workers(
            f"m{number}", choose.choices(keeps, (4, 6, 1))[0], choose.randint(1, 30), num_replicas=choose.randint(1, 2)
        )
        for number in range(choose.randint(1, 8))
    ]
    candidates = {each.name: list(capacity) for each in models}
    try:
        found = place(models, capacity, candidates)
    except ConfigError:
        assert sum(each.memory_bytes * each.num_workers for each in models) > 0.3 * sum(capacity.values())
        return
    check_dedicated(found)
    for use in device_uses(found, capacity):
        assert use.shared_bytes is not None and use.shared_bytes >= 0
        assert all(each.memory[use.device] <= use.shared_bytes for each in use.models if each.keep == "on_demand")
    again = place(models, capacity, candidates)
    assert found == again and [each.name for each in found] == [each.name for each in models]
