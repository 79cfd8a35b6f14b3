"""`servekit top`: the live view over the whole terminal, until a key ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live

from servekit.terminal.client import Client
from servekit.terminal.drawing import draw
from servekit.terminal.feed import Feed
from servekit.terminal.keyboard import Keyboard
from servekit.terminal.process import run, with_standard_streams

_LEAST_INTERVAL_S = 0.1  # between two frames
_MOST_INTERVAL_S = 1.0  # an old frame tells its age
_PLAIN_WIDTH, _PLAIN_HEIGHT = 100, 200
_LEAVE = frozenset({"q", "Q", "c-c", "c-d"})


def top(url: str, api_key: str | None) -> int:
    """Draw until somebody leaves; in a pipe, one frame. Returns the exit code.

    Raises ServerTrouble, StreamTrouble, ConfigError.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    client = Client(url, api_key)

    def show() -> int:
        watches = sys.stdin.isatty() and console.is_terminal and not console.is_dumb_terminal
        return run(_watch(client, console) if watches else _print(client))

    return with_standard_streams(show)


async def _print(client: Client) -> int:
    """One frame, as it would be on an endless page."""
    async with client:
        state = await client.live_state()
    lines = draw(state, _PLAIN_WIDTH, _PLAIN_HEIGHT)
    sys.stdout.write("".join(f"{line.plain.removesuffix('q leaves').rstrip()}\n" for line in lines))
    return 0


async def _watch(client: Client, console: Console) -> int:
    loop = asyncio.get_running_loop()
    async with client:
        feed = Feed(client)
        leaves = asyncio.Event()
        loop.add_signal_handler(signal.SIGWINCH, feed.changed.set)

        def heard(key: str) -> bool:
            if key in _LEAVE:
                leaves.set()
            return True

        tasks: list[asyncio.Task[object]] = []
        # Until the first frame there is nothing to look at, and an error is told on the screen as it was.
        with Keyboard() as keyboard, keyboard.listening(heard):
            try:
                tasks.append(asyncio.create_task(feed.follow()))
                tasks.append(asyncio.create_task(leaves.wait()))
                tasks.append(asyncio.create_task(_draw(feed, console)))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return 0


async def _draw(feed: Feed, console: Console) -> None:
    """Each frame that is new when the last one is drawn; between frames that come too fast the newest one wins."""
    while feed.state is None:  # a new size is a change, too
        await feed.changed.wait()
        feed.changed.clear()
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as screen:
        while True:
            feed.changed.clear()
            width, height = console.size
            screen.update(Group(*draw(feed.state, width, height, feed.trouble())), refresh=True)
            await asyncio.sleep(_LEAST_INTERVAL_S)
            # Not `wait_for`: of Python 3.11, it forgets that it was cancelled if what it waits for comes just then.
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOST_INTERVAL_S):
                    await feed.changed.wait()
