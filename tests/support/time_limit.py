"""A limit of time for each test that is not long: one that waits forever fails, and says where it waits.

pytest's own limit (`faulthandler_timeout` in pyproject.toml) is later, and ends the process: it is for tests that wait
in compiled code, which no signal handler of Python interrupts.
"""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Of the setup, the test, or the teardown. The longest takes a minute and a half on a machine that does much else.
LIMIT_S = 300.0
# An interruption may end in a task that nothing waits for, so it is repeated.
AGAIN_S = 10.0


@contextmanager
def limited(what: str, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Fail the test if the block takes longer, with the stacks of all threads and tasks in the message.

    Does nothing outside the main thread, in which alone Python handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def fail(*_: object) -> None:
        pytest.fail(f"{what} took longer than {limit_s:g} s\n{_stacks()}")

    handler = signal.signal(signal.SIGALRM, fail)
    outer = signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, handler)


def _stacks() -> str:
    """Return where each thread is, and each task of the event loop that runs in this one."""
    text = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        text.write(f"\n{names.get(ident, 'a thread of compiled code')}:\n{''.join(traceback.format_stack(frame))}")
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs
        tasks = set()
    for task in tasks:
        text.write("\n")
        task.print_stack(file=text)
    return text.getvalue()
