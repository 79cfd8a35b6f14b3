"""Run an event loop in a thread of its own, and call it from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

TICK_S = 0.1  # how often a waiting thread is called back
CANCEL_TIMEOUT_S = 10.0  # for a cancelled call to release what it holds
CLOSE_TIMEOUT_S = 60.0  # the engine ends its processes in seconds, and kills them if they do not end


class LoopClosed(Exception):
    """The event loop has ended, or ends."""


class EventLoopThread:
    """Runs coroutines of other threads until it is closed.

    The thread is a daemon, because the interpreter waits for others before it calls what closes them at exit. All child
    processes of the coroutines are started by this thread, and the kernel ends them with it.
    """

    def __init__(self, name: str) -> None:
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._is_closing = False
        self._closed = asyncio.Event()
        self._at_close: Callable[[], Awaitable[None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    def _run(self) -> None:
        # The standard event loop: uvloop would handle SIGCHLD for the whole program.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._started.set_result(asyncio.get_running_loop())
        await self._closed.wait()
        if self._at_close is not None:
            await self._at_close()
        # The runner cancels all calls that are left.

    def call(self, coroutine: Coroutine[Any, Any, Result], on_tick: Callable[[], None] = lambda: None) -> Result:
        """Run a coroutine on the loop, and return its result. `on_tick` is called in this thread while it runs.

        If this thread is interrupted, as by Ctrl-C, the coroutine is cancelled, and this waits until it has ended.
        Raises LoopClosed if the loop is closed before the coroutine ends.
        """
        outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
        tasks: list[asyncio.Task[Result]] = []

        def begin() -> None:
            task = self._loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(lambda _: _copy(task, outcome))

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # it is closed
            coroutine.close()
            raise LoopClosed from None
        try:
            while not outcome.done():
                concurrent.futures.wait([outcome], timeout=TICK_S)
                on_tick()
                if not self._thread.is_alive() and not outcome.done():
                    raise LoopClosed  # the coroutine came after the runner had cancelled the others
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                concurrent.futures.wait([outcome], timeout=CANCEL_TIMEOUT_S)
            raise
        return outcome.result()

    def close(self, at_close: Callable[[], Awaitable[None]]) -> None:
        """Await `at_close` on the loop, cancel all calls, and end the thread. Idempotent, and safe in any thread."""
        if not self._is_closing:
            self._is_closing, self._at_close = True, at_close
            self._loop.call_soon_threadsafe(self._closed.set)
        if threading.current_thread() is not self._thread:  # the garbage collector calls this in any thread
            self._thread.join(CLOSE_TIMEOUT_S)


def _copy(task: asyncio.Task[Result], outcome: concurrent.futures.Future[Result]) -> None:
    if task.cancelled():
        outcome.set_exception(LoopClosed())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
