"""The body process: it gives what the same code gives in this process, and is replaced when it is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from servekit.api import body_decoder
from servekit.api.body_decoder import BodyDecoder, unpack
from servekit.api.schemas.packed_body import PackedBody, Refusal
from servekit.errors import WorkerNotReady
from tests.servekit.api.schemas.test_packed_body import (
    COMPLETION,
    INVALID,
    MAX_TOKENS,
    TEXT,
    VALID,
    Kinds,
    decoded_here,
    encoded,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def body_process() -> AsyncIterator[BodyDecoder]:
    decoder = BodyDecoder(2**29)
    async with asyncio.timeout(120):
        yield decoder
    await decoder.stop()


@pytest.mark.parametrize(("kinds", "body"), [*VALID, *INVALID])
async def test_the_process_gives_what_the_same_code_gives_in_this_process(
    body_process: BodyDecoder, kinds: Kinds, body: dict[str, Any]
) -> None:
    text = encoded(body, kinds)
    assert await body_process.decode(text, kinds, MAX_TOKENS, "") == decoded_here(text, kinds, MAX_TOKENS)


async def test_body_is_decoded_although_the_process_is_killed_meanwhile(body_process: BodyDecoder) -> None:
    text = encoded({"prompt": "a"}, COMPLETION)
    await body_process.decode(text, COMPLETION, MAX_TOKENS, "")
    assert body_process._process is not None
    os.kill(body_process._process.pid, signal.SIGKILL)
    packed = await body_process.decode(text, COMPLETION, MAX_TOKENS, "")
    assert isinstance(packed, PackedBody)


async def test_a_tenant_pauses_after_a_large_body_and_another_tenant_does_not(
    body_process: BodyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_decoder, "PAUSE_PER_SECOND_S", 1e6)
    text = encoded({"prompt": "a"}, COMPLETION)
    await body_process.decode(text, COMPLETION, MAX_TOKENS, "greedy")
    second = asyncio.create_task(body_process.decode(text, COMPLETION, MAX_TOKENS, "greedy"))
    await body_process.decode(text, COMPLETION, MAX_TOKENS, "modest")
    assert not second.done()
    await body_process.decode(text, COMPLETION, MAX_TOKENS, "greedy", is_answer=True)
    await body_process.decode(text, COMPLETION, MAX_TOKENS, "greedy", is_answer=True)
    assert not second.done(), "an answer of another server has no pause, and ends none"
    second.cancel()


async def test_cancelled_body_leaves_no_result_for_the_next_one(body_process: BodyDecoder) -> None:
    await body_process.start()
    assert body_process._process is not None
    pid = body_process._process.pid
    first = asyncio.create_task(body_process.decode(encoded({"prompt": TEXT}, COMPLETION), COMPLETION, MAX_TOKENS, ""))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    packed = await body_process.decode(encoded({"prompt": "second"}, COMPLETION), COMPLETION, MAX_TOKENS, "")
    assert isinstance(packed, PackedBody)
    assert (await unpack(packed))[0].prompt == "second"
    assert body_process._process.pid == pid, "a client that leaves costs the others no start of a process"


async def test_process_that_cannot_be_started_is_a_server_error_and_the_next_body_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = BodyDecoder(2**29)

    async def fail(*command: str, **options: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    text = encoded({"prompt": "a"}, COMPLETION)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", fail)
        with pytest.raises(WorkerNotReady):
            await decoder.decode(text, COMPLETION, MAX_TOKENS, "")
    assert isinstance(await decoder.decode(text, COMPLETION, MAX_TOKENS, ""), PackedBody)
    await decoder.stop()


async def test_body_that_needs_too_much_memory_is_refused_and_the_next_one_is_decoded() -> None:
    decoder = BodyDecoder(2**26)
    try:
        refusal = await decoder.decode(encoded({"prompt": [[1]] * 2_000_000}, COMPLETION), COMPLETION, MAX_TOKENS, "")
        assert isinstance(refusal, Refusal) and "memory" in refusal.message
        packed = await decoder.decode(encoded({"prompt": "a"}, COMPLETION), COMPLETION, MAX_TOKENS, "")
        assert isinstance(packed, PackedBody)
    finally:
        await decoder.stop()
    with pytest.raises(WorkerNotReady):
        await decoder.decode(encoded({"prompt": "a"}, COMPLETION), COMPLETION, MAX_TOKENS, "")
