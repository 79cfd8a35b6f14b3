"""Work that may take minutes, beside the event loop and without holding up the process's end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


async def in_daemon_thread(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """The result of `function(argument)`, run in a thread that nobody waits for when the process is told to end.

    asyncio.to_thread would have the interpreter wait for the download of a model before it exits.
    """
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on a cancelled caller does not take the result's place

    def run() -> None:
        try:
            future.set_result(function(argument))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=function.__name__).start()
    return await asyncio.wrap_future(future)
