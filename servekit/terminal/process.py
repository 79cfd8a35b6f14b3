"""The process round a command: the standard streams it needs, the signals that end it, its exit code."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from servekit.errors import ServekitError


class StreamTrouble(ServekitError):
    """Standard input or output is closed, or fails."""


def with_standard_streams(command: Callable[[], int]) -> int:
    """The command's exit code, or 1 when nobody reads what it writes any more. Raises StreamTrouble.

    Nothing that was written waits in a buffer afterwards: the interpreter would write it at its end, and tell of an
    error in its own way.
    """
    for name, stream in (("input", sys.stdin), ("output", sys.stdout)):
        if stream is None:  # as of `<&-`
            raise StreamTrouble(f"standard {name} is closed; a terminal, a pipe or /dev/null can take its place")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what this place's encoding lacks is no reason to end
    try:
        exit_code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        return 1
    except OSError as error:
        raise StreamTrouble(f"cannot write: {error.strerror or error}") from None
    else:
        return exit_code
    finally:
        _flush_or_drop()


def _flush_or_drop() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main: Coroutine[Any, Any, int]) -> int:
    """Its exit code; SIGTERM, and the SIGHUP of a terminal that goes, cancel it, so that it can put things in order."""
    ended_by: list[int] = []

    async def until_ended() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            ended_by.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                loop.add_signal_handler(number, end, number)
        return await main

    try:
        return asyncio.run(until_ended())
    except asyncio.CancelledError:
        if not ended_by:
            raise
    except OSError:
        if not ended_by:  # else: the terminal went, and could not be put in order
            raise
    return 128 + ended_by[0]
