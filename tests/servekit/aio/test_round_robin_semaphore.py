"""The semaphore that tenants get in turns."""

from __future__ import annotations

import asyncio
import random

from servekit.aio.round_robin_semaphore import RoundRobinSemaphore


async def test_tenants_get_the_place_in_turns() -> None:
    semaphore, order = RoundRobinSemaphore(1), list[str]()

    async def work(tenant: str) -> None:
        await semaphore.acquire(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        semaphore.release(tenant)

    tasks = [asyncio.create_task(work(tenant)) for tenant in ("a", "a", "a", "a", "b", "b")]
    await asyncio.sleep(0)
    assert semaphore.num_waiting("a") == 3
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "a", "b", "a", "b"], "the second of a has left"
    assert semaphore.num_waiting("a") == 0
    await semaphore.acquire("c")
    semaphore.release("c")


async def test_one_tenant_leaves_a_place_for_another() -> None:
    semaphore = RoundRobinSemaphore(2, max_per_tenant=1)
    await semaphore.acquire("a")
    second = asyncio.create_task(semaphore.acquire("a"))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await semaphore.acquire("b")
        semaphore.release("b")
        await asyncio.sleep(0)
        assert not second.done(), "the place of b stays free"
        semaphore.release("a")
        await second


async def test_requests_without_a_key_may_hold_all_places_if_that_is_set() -> None:
    semaphore = RoundRobinSemaphore(2, max_per_tenant=1, anonymous_may_hold_all=True)
    async with asyncio.timeout(60):
        await semaphore.acquire("")
        await semaphore.acquire("")
    semaphore.release("")
    await semaphore.acquire("a")
    semaphore.release("")
    second = asyncio.create_task(semaphore.acquire("a"))
    await asyncio.sleep(0)
    assert not second.done(), "a tenant with a name leaves a place"
    second.cancel()


async def test_a_task_cancelled_after_it_got_the_place_passes_it_on() -> None:
    semaphore = RoundRobinSemaphore(1)
    await semaphore.acquire("a")
    first, second = (asyncio.create_task(semaphore.acquire(tenant)) for tenant in "ab")
    await asyncio.sleep(0)
    semaphore.release("a")
    first.cancel()  # it has the place and has not run since
    async with asyncio.timeout(60):
        await asyncio.wait([first])
        await second
    assert first.cancelled()


async def test_no_place_is_lost_and_none_is_given_twice() -> None:
    chance = random.Random(1)
    semaphore = RoundRobinSemaphore(3, max_per_tenant=2)
    holders = list[str]()

    async def work(tenant: str) -> None:
        await semaphore.acquire(tenant)
        holders.append(tenant)
        assert len(holders) <= 3 and holders.count(tenant) <= 2
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            holders.remove(tenant)
            semaphore.release(tenant)

    async with asyncio.timeout(60):
        tasks = [asyncio.create_task(work(chance.choice("abcd"))) for _ in range(1000)]
        while not all(task.done() for task in tasks):
            chance.choice(tasks).cancel()
            await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {type(None), asyncio.CancelledError}
        for tenant in "abc":
            assert semaphore.num_waiting(tenant) == 0
            await semaphore.acquire(tenant)
