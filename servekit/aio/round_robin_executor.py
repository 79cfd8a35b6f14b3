"""Run calls in threads that tenants use in turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from servekit.aio.round_robin_semaphore import RoundRobinSemaphore

Result = TypeVar("Result")


POLL_S = 0.002


class ExecutorShutDown(Exception):
    """The executor begins no more calls."""


class RoundRobinExecutor:
    """A thread pool whose queue holds little work: the rest waits here, where the tenants take turns.

    The pool has at most `max_submitted` calls, and at most `max_per_tenant` of one tenant. More calls than threads
    keep the threads busy until the event loop submits the next. The calls should be short then: none overtakes another.
    """

    def __init__(self, name: str, num_threads: int, max_submitted: int, max_per_tenant: int) -> None:
        self._begun: list[threading.Thread] = []
        self._threads = ThreadPoolExecutor(
            max_workers=num_threads,
            thread_name_prefix=name,
            initializer=lambda: self._begun.append(threading.current_thread()),
        )
        self._places = RoundRobinSemaphore(max_submitted, max_per_tenant)

    def num_waiting(self, tenant: str) -> int:
        return self._places.num_waiting(tenant)

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Call `work` in a thread. Raises ExecutorShutDown.

        If the caller is cancelled while it runs, it keeps its place until it ends: its thread is not free before.
        """
        await self._places.acquire(tenant)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError:  # raised by the pool after its shutdown, and by nothing else here
            self._places.release(tenant)
            raise ExecutorShutDown from None
        running.add_done_callback(lambda _: self._places.release(tenant))
        return await asyncio.shield(running)

    def shutdown(self) -> None:
        """Cancel what no thread has begun. Calls that wait for their turn raise ExecutorShutDown then."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def wait_ended(self, timeout_s: float) -> bool:
        """Wait, after `shutdown`, until no thread is left. Return whether none is."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while any(thread.is_alive() for thread in self._begun):
            if asyncio.get_running_loop().time() > deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        return True
