"""The threads of an executor end when it is shut down."""

from __future__ import annotations

import threading

from servekit.aio.round_robin_executor import RoundRobinExecutor


async def test_no_thread_is_left_after_the_wait() -> None:
    executor = RoundRobinExecutor("claims", num_threads=2, max_submitted=2, max_per_tenant=2)
    await executor.run("a", lambda: None)
    executor.shutdown()
    assert await executor.wait_ended(timeout_s=30.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("claims")]


async def test_the_wait_has_an_end_while_a_thread_works() -> None:
    executor, may_end = RoundRobinExecutor("claims", 1, 1, 1), threading.Event()
    began = threading.Event()

    def work() -> None:
        began.set()
        may_end.wait(30.0)

    running = executor._threads.submit(work)
    assert began.wait(30.0)
    executor.shutdown()
    assert not await executor.wait_ended(timeout_s=0.01)
    may_end.set()
    assert await executor.wait_ended(timeout_s=30.0)
    assert running.done()
