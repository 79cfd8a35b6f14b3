"""Show the live view of a server on the whole terminal: `servekit top`."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live

from servekit.terminal.client import Client
from servekit.terminal.drawing import QUIT_HINT, draw
from servekit.terminal.feed import Feed
from servekit.terminal.keyboard import Keyboard
from servekit.terminal.process import run, with_standard_streams

_MIN_FRAME_INTERVAL_S = 0.1
_MAX_FRAME_INTERVAL_S = 1.0  # to update the age of an old frame
_PLAIN_WIDTH, _PLAIN_HEIGHT = 100, 200
_NEXT_KEYS = frozenset({"tab", "c-i", "n"})
_QUIT_KEYS = frozenset({"q", "Q", "c-c", "c-d"})


def top(url: str, api_key: str | None, model: str | None = None) -> int:
    """Draw frames until the user quits; print a single frame if there is no terminal. Return the exit code.

    Raises RequestFailed, StandardStreamFailed, ConfigError.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    client = Client(url, api_key)
    client.model = model

    def show() -> int:
        is_interactive = sys.stdin.isatty() and console.is_terminal and not console.is_dumb_terminal
        return run(_watch(client, console) if is_interactive else _print(client))

    return with_standard_streams(show)


async def _print(client: Client) -> int:
    """Print one frame, of unlimited height."""
    async with client:
        state = await client.live_state()
    lines = draw(state, _PLAIN_WIDTH, _PLAIN_HEIGHT)
    sys.stdout.write("".join(f"{line.plain.removesuffix(QUIT_HINT).rstrip()}\n" for line in lines))
    return 0


async def _watch(client: Client, console: Console) -> int:
    loop = asyncio.get_running_loop()
    async with client:
        feed = Feed(client)
        quits = asyncio.Event()
        loop.add_signal_handler(signal.SIGWINCH, feed.changed.set)

        def on_key(key: str) -> bool:
            if key in _QUIT_KEYS:
                quits.set()
            elif key in _NEXT_KEYS:
                feed.show_next_model()
            return True

        tasks: list[asyncio.Task[object]] = []
        # The full screen begins with the first frame, so an error before it is printed on the normal screen.
        with Keyboard() as keyboard, keyboard.listening(on_key):
            try:
                tasks.append(asyncio.create_task(feed.follow()))
                tasks.append(asyncio.create_task(quits.wait()))
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
    """Draw the newest frame; frames that arrive faster than _MIN_FRAME_INTERVAL_S are skipped."""
    while feed.state is None:  # a new size of the terminal sets `changed`, too
        await feed.changed.wait()
        feed.changed.clear()
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as screen:
        while True:
            feed.changed.clear()
            width, height = console.size
            screen.update(Group(*draw(feed.state, width, height, feed.warning())), refresh=True)
            await asyncio.sleep(_MIN_FRAME_INTERVAL_S)
            # Not `wait_for`: in Python 3.11 it loses a cancellation that arrives together with the awaited event.
            with suppress(TimeoutError):
                async with asyncio.timeout(_MAX_FRAME_INTERVAL_S):
                    await feed.changed.wait()
