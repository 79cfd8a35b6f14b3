import asyncio
import threading

import pytest

from servekit.embedded.event_loop_thread import EventLoopThread, LoopClosed


async def nothing() -> None:
    pass


async def twice(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def fail() -> None:
    raise ValueError("as planned")


def test_a_call_returns_the_result_or_raises() -> None:
    thread = EventLoopThread("test")
    try:
        assert thread.call(twice(4)) == 8
        with pytest.raises(ValueError, match="as planned"):
            thread.call(fail())
    finally:
        thread.close(nothing)


def test_an_interrupted_call_ends_its_coroutine_first() -> None:
    has_begun, ended = threading.Event(), []

    async def wait() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    def interrupt() -> None:
        if has_begun.is_set():
            raise KeyboardInterrupt

    thread = EventLoopThread("test")
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.call(wait(), on_tick=interrupt)
        assert ended == [True]
        assert thread.call(twice(1)) == 2
    finally:
        thread.close(nothing)


def test_closing_ends_the_calls_of_other_threads() -> None:
    thread, has_begun, errors = EventLoopThread("test"), threading.Event(), []

    async def wait() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            thread.call(wait())
        except LoopClosed as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert has_begun.wait(60)
    thread.close(nothing)
    caller.join(60)
    assert len(errors) == 1
    with pytest.raises(LoopClosed):
        thread.call(twice(1))
    thread.close(nothing)


def test_the_loop_thread_itself_may_close_it() -> None:
    """The garbage collector runs in any thread."""
    thread, closed = EventLoopThread("test"), threading.Event()

    async def note() -> None:
        closed.set()

    async def close() -> None:
        thread.close(note)

    thread.call(close())
    assert closed.wait(60)
