"""Receive the frames of the live view; reconnect when the server is gone, and report how old the last frame is."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from servekit.client.http_client import RequestFailed
from servekit.observability.live_frames import LiveState
from servekit.terminal.client import Client

_STALE_S = 5.0  # the server sends a frame every second, and every few seconds under very high load
_SILENCE_TIMEOUT_S = 30.0
_RETRY_INTERVAL_S = 1.0


class Feed:
    """The newest frame of a server. Only the task that runs `follow` writes it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._received_s = 0.0
        self._problem = ""
        self.state: LiveState | None = None
        self.changed = asyncio.Event()

    async def follow(self) -> None:
        """Receive frames forever; reconnect after the connection to the server is lost.

        Raises RequestFailed if the first connection fails, or if the failure is permanent.
        """
        while True:
            try:
                async with aclosing(self._client.live_states(_SILENCE_TIMEOUT_S)) as states:
                    shown = self._client.model
                    async for state in states:
                        self._update(state, "")
                        if self._client.model != shown:
                            break
                if self._client.model != shown:
                    continue
                raise RequestFailed(f"{self._client.url} closed the connection")
            except RequestFailed as failure:
                if self.state is None or failure.is_permanent:
                    raise
                self._update(self.state, failure.message)
            await asyncio.sleep(_RETRY_INTERVAL_S)

    def show_next_model(self) -> None:
        """Show the next one of the server's models, from the frame after the next one on."""
        names = [] if self.state is None else [each.name for each in self.state.models]
        if names:
            shown = self._client.model or (self.state.model_name if self.state else "")
            self._client.model = names[(names.index(shown) + 1) % len(names) if shown in names else 0]

    def warning(self) -> str:
        """Return why there is no newer frame and how old the last one is; empty if it is current."""
        age_s = time.monotonic() - self._received_s
        if self._problem:
            return f"{self._problem}; this frame is {age_s:.0f} s old"
        return f"no data from the server; this frame is {age_s:.0f} s old" if age_s > _STALE_S else ""

    def _update(self, state: LiveState, problem: str) -> None:
        if not problem:
            self._received_s = time.monotonic()
        self.state, self._problem = state, problem
        self.changed.set()
