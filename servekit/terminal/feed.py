"""The live view's frames: the last one, and why there is no newer one when the server is gone."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from servekit.live_view import LiveState
from servekit.terminal.client import Client, ServerTrouble

_STALE_S = 5.0  # a frame comes every second, and even a very busy server's every few
_SILENCE_TIMEOUT_S = 30.0
_RETRY_INTERVAL_S = 1.0


class Feed:
    """Follows a server's frames. Owned by one task, `follow`; everybody else reads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._received_s = 0.0
        self._trouble = ""
        self.state: LiveState | None = None
        self.changed = asyncio.Event()

    async def follow(self) -> None:
        """For ever: a server that was there once is asked until it is there again.

        Raises ServerTrouble if it was not there at the start, or if it will not answer however often it is asked.
        """
        while True:
            try:
                async with aclosing(self._client.live_states(_SILENCE_TIMEOUT_S)) as states:
                    async for state in states:
                        self._note(state, "")
                raise ServerTrouble(f"{self._client.url} has closed the connection")
            except ServerTrouble as trouble:
                if self.state is None or trouble.is_lasting:
                    raise
                self._note(self.state, trouble.message)
            await asyncio.sleep(_RETRY_INTERVAL_S)

    def trouble(self) -> str:
        """Why the last frame is an old one, and how old; empty if it is not."""
        age_s = time.monotonic() - self._received_s
        if self._trouble:
            return f"{self._trouble}; this is {age_s:.0f} s old"
        return f"the server is silent; this is {age_s:.0f} s old" if age_s > _STALE_S else ""

    def _note(self, state: LiveState, trouble: str) -> None:
        if not trouble:
            self._received_s = time.monotonic()
        self.state, self._trouble = state, trouble
        self.changed.set()
