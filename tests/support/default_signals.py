"""Let a child process heed the signals that the tests may have inherited as ignored, as `preexec_fn`."""

from __future__ import annotations

import signal


def heed_hangups() -> None:
    """Undo nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def heed_interrupts() -> None:
    """Undo what a shell does to a command in the background: it ignores SIGINT, and so does what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def heed_signals() -> None:
    """Undo both."""
    heed_hangups()
    heed_interrupts()
