"""Run a terminal command: check its standard streams, end it on signals, and determine its exit code."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from servekit.errors import ServekitError

_HANGUP = 128 + signal.SIGHUP


class StandardStreamFailed(ServekitError):
    """Standard input or output is closed or cannot be used."""


def with_standard_streams(command: Callable[[], int]) -> int:
    """Run the command and return its exit code, or 1 if the reader of its output is gone. Raises StandardStreamFailed.

    The output buffer is empty afterwards: otherwise the interpreter would flush it at exit and report an error in its
    own way.
    """
    for name, stream in (("input", sys.stdin), ("output", sys.stdout)):
        if stream is None:  # as after `<&-`
            raise StandardStreamFailed(f"standard {name} is closed; connect it to a terminal, a pipe or /dev/null")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that the encoding lacks become question marks
    exit_code = 0
    try:
        exit_code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        return 1
    except OSError as error:
        if exit_code != _HANGUP:  # otherwise the terminal is gone, and the last frame with it
            raise StandardStreamFailed(f"cannot write to standard output: {error.strerror or error}") from None
    finally:
        _flush_or_drop()
    return exit_code


def _flush_or_drop() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run the coroutine and return the exit code.

    SIGTERM, and SIGHUP of a closed terminal, cancel the coroutine, so that it can restore the terminal.
    """
    ended_by: list[int] = []

    async def until_ended() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            ended_by.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, end, number)
        return await main

    try:
        return asyncio.run(until_ended())
    except asyncio.CancelledError:
        if not ended_by:
            raise
    except OSError as error:
        # A terminal that closes fails with EIO, sometimes before its SIGHUP arrives. It cannot be restored.
        if not ended_by and error.errno != errno.EIO:
            raise
    return 128 + ended_by[0] if ended_by else _HANGUP
