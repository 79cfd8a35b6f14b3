"""Let a test see what follows a pause of the whole process, without the pause."""

from __future__ import annotations

import time

import pytest


def pause(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Move the clock on, as if this process had been stopped for this time. The event loop reads the same clock."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)
