"""Run blocking work of several minutes in a thread that does not delay the process's exit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


async def run_in_daemon_thread(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """Return `function(argument)`, run in a daemon thread, which the interpreter does not wait for at exit.

    With asyncio.to_thread, the interpreter would wait for the download of a model before it exits.
    """
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on, cancelling the caller cannot cancel the future

    def run() -> None:
        try:
            future.set_result(function(argument))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=function.__name__).start()
    return await asyncio.wrap_future(future)
