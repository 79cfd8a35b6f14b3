"""One client process: `python -m loadtest.running.fleet_process FD`, started by the parent only."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from typing import NoReturn

import uvloop

from loadtest.errors import LoadTestError
from loadtest.running.fleet_messages import (
    NUM_IN_MESSAGE,
    Failed,
    Finished,
    Prepare,
    Ready,
    Records,
    Reported,
    Requests,
    Start,
    Stop,
    decode_command,
    read_message,
    write_message,
)
from loadtest.running.runner import Runner
from loadtest.running.warm_up import warm_up


async def _serve_parent(own: socket.socket) -> None:
    """Carry out the commands of the parent; end when it is gone."""
    reader, writer = await asyncio.open_connection(sock=own)
    try:
        await _run_share(reader, writer)
    except LoadTestError as error:
        write_message(writer, Failed(str(error)))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # the parent has to know of every error
        write_message(writer, Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        try:
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            pass


async def _run_share(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    command = decode_command(await read_message(reader))
    assert isinstance(command, Prepare)
    while len(command.plan.requests) < command.num_requests:
        more = decode_command(await read_message(reader))
        assert isinstance(more, Requests)
        command.plan.requests.extend(more.requests)
    await warm_up(command.target, command.warm_up, command.model, command.sources)
    runner = Runner(
        command.target,
        command.plan,
        model=command.model,
        process=command.process,
        sources=command.sources,
        on_progress=lambda progress: write_message(writer, Reported(progress)),
    )
    write_message(writer, Ready())
    start = decode_command(await read_message(reader))
    assert isinstance(start, Start)
    listening = asyncio.create_task(_listen(reader, runner))
    result = await runner.run(start.start_s)
    listening.cancel()
    for begin in range(0, len(result.records), NUM_IN_MESSAGE):
        write_message(writer, Records(result.records[begin : begin + NUM_IN_MESSAGE]))
        await writer.drain()
    write_message(writer, Finished(result.lags_s, result.cpu_s, result.max_rss_bytes, result.errors))


async def _listen(reader: asyncio.StreamReader, runner: Runner) -> None:
    try:
        while not isinstance(decode_command(await read_message(reader)), Stop):
            pass
    except (EOFError, ConnectionError):
        pass  # the parent is gone, so the results are of no use
    runner.stop()


def main() -> NoReturn:
    """Raise the limit of open files and run."""
    # The usual limit of 1024 is for programs that call select(); each stream needs a file.
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    uvloop.run(_serve_parent(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # nothing is left to do, and freeing 100,000 objects one by one takes seconds


if __name__ == "__main__":
    main()
