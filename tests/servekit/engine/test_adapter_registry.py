"""Which adapters there are, and who may use one at the same time as others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from servekit.config import ServeConfig
from servekit.engine import adapter_registry
from servekit.engine.adapter_registry import AdapterRegistry, AdapterUse, adapters_at_start, check_adapters
from servekit.errors import ConfigError, InvalidRequest, ModelNotFound, QueueFull
from servekit.protocol.lora import AdapterLoaded, LoadAdapter


async def registry_of(*names: str, **settings: Any) -> AdapterRegistry:
    """Return a registry of these adapters. A path that contains "bad" is refused."""

    async def ask(request: LoadAdapter) -> AdapterLoaded:
        await asyncio.sleep(0)
        return AdapterLoaded("it is bad") if "bad" in request.adapter.path else AdapterLoaded(fingerprint="f", rank=8)

    registry = AdapterRegistry(ServeConfig(**{"enable_lora": True, "max_loras": 2, **settings}), ask)
    for name in names:
        await registry.load(name, f"/{name}")
    return registry


@pytest.mark.parametrize("lora", ["a", "a=", "=b", "a=b,", "a b=c", "a=b,a=c", "demo=b", "dummy=b", "tgi=b"])
def test_adapters_that_are_not_name_and_path_are_refused(lora: str) -> None:
    with pytest.raises(ConfigError, match="--lora"):
        adapters_at_start(ServeConfig(lora=lora))


def test_adapters_of_the_settings_have_a_name_and_a_path() -> None:
    assert adapters_at_start(ServeConfig(lora="a=/x=y,b/c=z")) == {"a": "/x=y", "b/c": "z"}
    assert adapters_at_start(ServeConfig()) == {}


def test_adapters_with_a_pipeline_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline-parallel-size"):
        check_adapters(ServeConfig(lora="a=b", pipeline_parallel_size=2))
    check_adapters(ServeConfig(pipeline_parallel_size=2))
    check_adapters(ServeConfig(lora="a=b", listen_workers="unix:/x"))


async def test_usage_says_which_adapters_have_requests() -> None:
    registry = await registry_of("a", "b", "c")
    assert registry.usage() == (3, 0, {}, ())
    uses = [registry.begin_use(name, "") for name in ("a", "b", "b")]
    waiting = asyncio.create_task(registry.wait_for_use("c", ""))
    await asyncio.sleep(0)
    await registry.unload("a")
    await registry.load("a", "/a")
    assert registry.usage() == (3, 1, {"a": 1, "b": 2}, ("c",))
    assert registry.live().in_use == [("b", 2), ("a", 1)]
    for use in uses:
        assert use is not None
        use.release()
    (await waiting).release()
    assert registry.usage() == (3, 0, {}, ())


async def test_an_adapter_that_is_loaded_again_is_another_one() -> None:
    registry = await registry_of("a")
    first = registry.begin_use("a", "")
    with pytest.raises(InvalidRequest, match="loaded already"):
        await registry.load("a", "/a")
    await registry.unload("a")
    with pytest.raises(ModelNotFound):
        registry.begin_use("a", "")
    with pytest.raises(ModelNotFound):
        await registry.unload("a")
    await registry.load("a", "/a")
    second = registry.begin_use("a", "")
    assert first is not None and second is not None
    assert first.adapter.number != second.adapter.number and second.adapter.path == "/a"


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [("b c", "/b", "letters"), ("", "/b", "letters"), ("b", "/bad", "it is bad"), ("b", "/\0", "not a path")],
)
async def test_an_adapter_that_is_refused_leaves_its_name_free(name: str, path: str, reason: str) -> None:
    registry = await registry_of("a")
    with pytest.raises(InvalidRequest, match=reason):
        await registry.load(name, path)
    assert list(registry.paths) == ["a"]
    await registry.load("b", "/b")


async def test_two_loads_of_one_name_at_once_give_one_adapter() -> None:
    registry = await registry_of()
    outcomes = await asyncio.gather(registry.load("a", "/1"), registry.load("a", "/2"), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), InvalidRequest]
    assert registry.paths == {"a": "/1"}


async def test_without_enable_lora_nothing_is_loaded_at_run_time() -> None:
    registry = await registry_of(enable_lora=False, lora="a=/a")
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        await registry.load("b", "/b")
    await registry.start()
    assert registry.paths == {"a": "/a"}


async def test_an_adapter_waits_for_a_place_and_those_behind_it_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_registry, "OVERTAKEN_S", 0.0)
    registry = await registry_of("a", "b", "c")
    uses = [registry.begin_use(name, "") for name in ("a", "b", "a")]
    assert all(uses) and registry.begin_use("c", "") is None
    waiting = [asyncio.create_task(registry.wait_for_use(name, "")) for name in ("c", "a")]
    await asyncio.sleep(0)
    assert registry.begin_use("a", "") is None, "it would overtake those that wait"
    uses[0].release()
    uses[0].release()  # does nothing
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting), "the other request of a still has its place"
    uses[1].release()
    admitted = await asyncio.gather(*waiting)
    assert [use.adapter.path for use in admitted] == ["/c", "/a"]
    for use in (*admitted, uses[2]):
        use.release()
    assert registry.begin_use("b", "") is not None and registry.begin_use("c", "") is not None


async def test_a_request_for_an_adapter_in_use_goes_on_at_once_though_others_wait() -> None:
    registry = await registry_of("a", "b", "c", "d")
    uses = [registry.begin_use(name, "") for name in ("a", "b")]
    waiting = [asyncio.create_task(registry.wait_for_use(name, "")) for name in ("c", "d", "c")]
    await asyncio.sleep(0)
    assert registry.begin_use("a", "") is not None, "it needs no place"
    assert registry.begin_use("d", "") is None and not any(task.done() for task in waiting)
    assert uses[1] is not None
    uses[1].release()
    done, _ = await asyncio.wait(waiting, timeout=0.05)
    assert done == {waiting[0], waiting[2]}, "the second request for c needs no place of its own"
    waiting[1].cancel()


async def test_no_more_requests_wait_for_a_place_than_may_be_queued() -> None:
    registry = await registry_of("a", "b", "c", max_num_queued_reqs=1)
    uses = [registry.begin_use(name, "") for name in ("a", "b")]
    waiting = asyncio.create_task(registry.wait_for_use("c", ""))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_num_queued_reqs"):
        await registry.wait_for_use("c", "")
    assert uses[0] is not None
    uses[0].release()
    assert (await waiting).adapter.path == "/c"


async def test_no_tenant_takes_all_places_of_those_that_wait() -> None:
    registry = await registry_of("a", "b", "c", max_num_queued_reqs=4)
    uses = [registry.begin_use(name, "") for name in ("a", "b")]
    waiting = [asyncio.create_task(registry.wait_for_use("c", "greedy")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=r"2 requests wait .*, 2 of them for your API key.*the limit is 4"):
        await registry.wait_for_use("c", "greedy")
    waiting.append(asyncio.create_task(registry.wait_for_use("c", "other")))
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting) and uses[0] is not None
    waiting[0].cancel()
    uses[0].release()
    assert [(await each).adapter.path for each in waiting[1:]] == ["/c"] * 2
    assert registry.begin_use("a", "") is None
    again = [asyncio.create_task(registry.wait_for_use("a", "greedy")) for _ in range(2)]  # all places were given back
    await asyncio.sleep(0)
    assert registry.usage().num_waiting == 2
    for each in again:
        each.cancel()


async def test_a_request_that_leaves_the_queue_lets_those_behind_it_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_registry, "OVERTAKEN_S", 0.0)
    registry = await registry_of("a", "b", "c")
    uses = [registry.begin_use(name, "") for name in ("a", "b")]
    first, second = (asyncio.create_task(registry.wait_for_use(name, "")) for name in ("c", "a"))
    await asyncio.sleep(0)
    first.cancel()
    use = await second
    assert use.adapter.path == "/a" and all(uses)
    use.release()


async def test_a_request_that_waits_too_long_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_registry, "WAIT_TIMEOUT_S", 0.01)
    registry = await registry_of("a", "b", "c")
    uses = [registry.begin_use(name, "") for name in ("a", "b")]
    with pytest.raises(QueueFull, match="--max-loras"):
        await registry.wait_for_use("c", "")
    uses[0].release()
    assert registry.begin_use("c", "") is not None


async def waiting_for(registry: AdapterRegistry, *requests: tuple[str, str]) -> list[asyncio.Task[AdapterUse]]:
    """Return requests, each for an adapter and of a tenant, that have begun to wait in this order."""
    tasks = [asyncio.create_task(registry.wait_for_use(name, tenant)) for name, tenant in requests]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    return tasks


async def test_a_tenant_with_long_answers_leaves_a_place_to_one_that_has_not_asked_yet() -> None:
    """Before, one tenant could hold all places. Others waited until its answers ended, or for a refusal after 60 s."""
    registry = await registry_of(*"abcde", max_loras=4)
    uses = [registry.begin_use(name, "greedy") for name in "abcd"]
    assert [use is not None for use in uses] == [True, True, True, False]
    (waiting,) = await waiting_for(registry, ("d", "greedy"))
    async with asyncio.timeout(60):
        (await registry.wait_for_use("e", "other")).release()  # overtakes a request that may not take the place
    assert not waiting.done()
    assert uses[0] is not None
    uses[0].release()
    assert (await waiting).adapter.path == "/d"


async def test_a_place_is_kept_for_each_tenant_that_has_asked_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = await registry_of(*"abcdef", max_loras=6)
    for tenant in ("one", "two", "three", "four"):
        use = registry.begin_use("a", tenant)
        assert use is not None
        use.release()
    assert all(registry.begin_use(name, "greedy") for name in "abc"), "half of the places are kept at most"
    assert registry.begin_use("d", "greedy") is None
    assert all(registry.begin_use(name, tenant) for name, tenant in (("d", "one"), ("e", "two"), ("f", "three")))
    later = await registry_of(*"abcdef", max_loras=6)
    for tenant in ("one", "two"):
        use = later.begin_use("a", tenant)
        assert use is not None
        use.release()
    monkeypatch.setattr(adapter_registry, "SEEN_S", -1.0)
    assert all(later.begin_use(name, "greedy") for name in "abcde") and later.begin_use("f", "greedy") is None


async def test_no_place_is_kept_without_keys_or_for_a_new_tenant_where_there_are_few() -> None:
    registry = await registry_of(*"abcd", max_loras=4)
    assert all(registry.begin_use(name, "") for name in "abcd")
    registry = await registry_of("a", "b", max_loras=2)
    assert all(registry.begin_use(name, "only") for name in "ab")


async def test_the_backlog_of_one_tenant_does_not_delay_another() -> None:
    registry = await registry_of("a", "b", "c", "d", "e")
    uses = [registry.begin_use(name, "greedy") for name in ("a", "b")]
    assert all(uses)
    waiting = await waiting_for(registry, ("c", "greedy"), ("d", "greedy"), ("e", "other"), ("d", "other"))
    uses[0].release()
    assert (await waiting[2]).adapter.path == "/e", "the tenant with fewer places is first"
    uses[1].release()
    assert (await waiting[0]).adapter.path == "/c", "of two with as many, the one that has waited longer"
    (await waiting[2]).release()
    assert {(await task).adapter.path for task in (waiting[1], waiting[3])} == {"/d"}, "they share a place"
    for task in (waiting[0], waiting[1], waiting[3]):
        (await task).release()
    assert registry.usage() == (5, 0, {}, ()) and not registry._used_by and not registry._waiting


async def test_a_tenant_that_waits_keeps_those_that_hold_more_from_their_busy_adapters_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_registry, "OVERTAKEN_S", 0.0)
    registry = await registry_of("a", "b", "c", "d", max_loras=3)
    uses = {name: registry.begin_use(name, tenant) for name, tenant in (("a", "x"), ("b", "x"), ("c", "y"))}
    waiting = await waiting_for(registry, ("d", "x"))
    again = registry.begin_use("c", "y")
    assert again is not None, "y holds less than x, whose backlog is its own affair"
    again.release()
    assert registry.begin_use("a", "x") is None, "x overtakes itself no longer"
    assert registry.begin_use("a", "z") is not None, "one that holds nothing may share a place"
    waiting += await waiting_for(registry, ("d", "w"))
    for name, tenant in (("c", "y"), ("a", "x"), ("a", "v")):
        assert registry.begin_use(name, tenant) is None, "w has no place yet"
    use = uses["c"]
    assert use is not None
    use.release()
    assert {(await task).adapter.path for task in waiting} == {"/d"}


async def test_a_request_that_others_overtake_is_next_for_tenants_that_take_turns_with_a_busy_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_registry, "OVERTAKEN_S", 0.0)
    registry = await registry_of("a", "b", max_loras=1)
    use = registry.begin_use("a", "x")
    waiting = await waiting_for(registry, ("b", "y"), ("a", "z"), ("a", "x"))
    assert use is not None
    use.release()
    (await waiting[0]).release()
    assert [(await task).adapter.path for task in waiting[1:]] == ["/a", "/a"]
