"""Tests of the socket that workers join at, with real sockets: which connections are accepted, refused and closed."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import socket
import ssl
import stat
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError, WorkerLost
from servekit.executor.model_executor import ModelExecutor
from servekit.joining import listener as listener_module
from servekit.joining.address import TcpAddress, UnixAddress
from servekit.joining.credentials import server_tls, worker_tls
from servekit.joining.socket_stream import SocketStream
from servekit.observability.metrics import JOIN_REFUSALS
from servekit.protocol.handshake import HandshakeFailed, Refused
from servekit.protocol.lora import AdapterLoaded, LoadAdapter, LoraAdapter
from servekit.protocol.messages import Leaving, LoadModel, Shutdown, StepResult, WorkerFailed
from tests.servekit.executor.conftest import PLAN
from tests.servekit.joining.clients import (
    ANY_PORT,
    ENOUGH_S,
    LOAD,
    MODEL,
    OFFER,
    READY,
    RecordingHandler,
    StandInWorker,
    closed,
    connect,
    listening,
    shake_hands,
)


async def executor_of(handler: RecordingHandler) -> ModelExecutor:
    joined = await handler.next_worker()
    executor = ModelExecutor(ServeConfig(), lambda: None)
    executor.adopt(joined)
    return executor


@pytest.mark.parametrize("is_unix", [False, True])
async def test_a_worker_joins_loads_and_computes_steps(is_unix: bool, tmp_path: Path) -> None:
    handler = RecordingHandler()
    async with listening(handler, tmp_path if is_unix else ANY_PORT) as listener:
        worker = await StandInWorker.join(listener.address)
        assert await worker.receive() == replace(LOAD, fingerprint=MODEL.fingerprint)
        worker.send(READY)
        executor = await executor_of(handler)
        executor.send(PLAN)
        assert await worker.receive() == PLAN
        worker.send(StepResult(0, 0, (7,), 0.0))
        assert (await executor.receive()) == StepResult(0, 0, (7,), 0.0) and executor.is_ready
        ending = asyncio.create_task(executor.stop())
        assert await worker.receive() == Shutdown()
        await worker.stream.end()
        await ending


async def test_a_worker_that_leaves_asks_for_no_more_steps_and_is_not_lost() -> None:
    handler, left = RecordingHandler(), asyncio.Event()
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        worker.send(READY)
        joined = await handler.next_worker()
        executor = ModelExecutor(ServeConfig(), lambda: None, on_leaving=left.set)
        executor.adopt(joined)
        worker.send(Leaving())
        async with asyncio.timeout(ENOUGH_S):
            await left.wait()
        assert executor.is_leaving and executor.loss is None
        await executor.stop(graceful=False)


async def test_the_loss_of_a_worker_that_joined_is_reported() -> None:
    handler, lost = RecordingHandler(), asyncio.Event()
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        worker.send(READY)
        joined = await handler.next_worker()
        executor = ModelExecutor(ServeConfig(), lost.set)
        executor.adopt(joined)
        await worker.stream.end()
        async with asyncio.timeout(ENOUGH_S):
            await lost.wait()
        assert isinstance(executor.loss, WorkerLost) and "closed the connection" in executor.loss.message
        await executor.stop()


# -- refused connections ----------------------------------------------------------------------------------------------


async def test_a_wrong_key_is_refused_with_a_sentence_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    handler = RecordingHandler()
    async with listening(handler) as listener:
        stream = await connect(listener.address)
        with pytest.raises(HandshakeFailed, match="key is not the server's") as refused:
            await shake_hands(stream, key=b"w" * 32)
        assert refused.value.is_permanent
        assert await closed(stream) == b""
        assert listener.num_refused == 1 and handler.joined.empty() and handler.refusals == ["wrong_key"]
    assert "key is not the server's" in caplog.text


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (("draining", "the server is draining"), "draining"),
        (("too_many", "4 workers have joined already"), "4 workers"),
    ],
)
async def test_the_engine_refuses_with_a_sentence(refusal: tuple[str, str], expected: str) -> None:
    handler = RecordingHandler()
    handler.refuses = refusal  # type: ignore[assignment]
    async with listening(handler) as listener:
        with pytest.raises(HandshakeFailed, match=expected) as refused:
            await shake_hands(await connect(listener.address))
        assert not refused.value.is_permanent


async def test_another_version_of_servekit_is_refused() -> None:
    async with listening(RecordingHandler()) as listener:
        with pytest.raises(HandshakeFailed, match=r"worker is servekit 0\.0\.1, and the server is"):
            await shake_hands(await connect(listener.address), offer=replace(OFFER, servekit_version="0.0.1"))


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 512,  # TLS, to a server without it
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x10\x01" + b"x" * 4097,  # a frame over the limit
        b"\xff\xff\xff\xff\x00\x00\x00\x00\x7f\xff\xff\xff",  # the long frames of multiprocessing's pipes
        b"\x00\x00\x00\x00",
    ],
    ids=["http", "tls", "garbage", "oversize", "long frame", "empty frame"],
)
async def test_garbage_is_refused_and_closed(garbage: bytes) -> None:
    handler = RecordingHandler()
    async with listening(handler) as listener:
        stream = await connect(listener.address)
        stream.write(garbage)
        answer = await closed(stream)
        assert len(answer) < 700  # a refusal at most
        assert listener.num_refused == 1 and handler.joined.empty() and handler.refusals == ["invalid"]
        await StandInWorker.join(listener.address)


async def test_a_replayed_handshake_is_refused() -> None:
    """A recorded handshake is sent a second time, byte for byte."""
    handler = RecordingHandler()
    async with listening(handler) as listener:
        stream, seen = await connect(listener.address), []
        write_frame = stream.write_frame
        stream.write_frame = lambda frame: (seen.append(frame), write_frame(frame))[1]  # type: ignore[method-assign]
        await shake_hands(stream)
        again = await connect(listener.address)
        for frame in seen:
            again.write_frame(frame)
        assert b"wrong_key" in await closed(again)
        assert handler.joined.empty()


@pytest.mark.parametrize("num_bytes", [0, 2, 30])
async def test_a_handshake_that_does_not_go_on_ends_in_time(num_bytes: int) -> None:
    """Half-open connections, and those that send one byte after the other."""
    handler = RecordingHandler()
    async with listening(handler, handshake_timeout_s=0.2) as listener:
        stream = await connect(listener.address)
        stream.write((b"\x00\x00\x00\x60" + b"x" * 60)[:num_bytes])
        assert await closed(stream) == b""
        assert listener.num_refused == 1 and handler.refusals == ["timeout"]


async def test_bytes_that_trickle_do_not_prolong_a_handshake() -> None:
    async with listening(RecordingHandler(), handshake_timeout_s=0.5) as listener:
        stream = await connect(listener.address)

        async def trickle() -> None:
            stream.write(b"\x00\x00\x0f\xff")
            while True:
                stream.write(b"x")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        assert await closed(stream) == b""
        trickling.cancel()
        assert listener.num_refused == 1


async def test_a_flood_of_unauthenticated_connections_keeps_no_worker_out_and_loses_none() -> None:
    """1,000 connections send nothing. At most the limit is open; the oldest ones are closed."""
    handler = RecordingHandler()
    async with listening(handler) as listener:
        before = await StandInWorker.join(listener.address)
        before.send(READY)
        executor = await executor_of(handler)
        for _ in range(1000):
            await connect(listener.address)
        after = await StandInWorker.join(listener.address)
        after.send(READY)
        await handler.next_worker()
        assert len(listener._handshakes) <= listener_module.MAX_HANDSHAKES
        assert listener.num_refused >= 1000 - listener_module.MAX_HANDSHAKES
        assert set(handler.refusals) == {"displaced"}
        executor.send(PLAN)
        assert (await before.receive(), await before.receive())[1] == PLAN
        before.send(StepResult(0, 0, (7,), 0.0))
        assert isinstance(await executor.receive(), StepResult)
        await executor.stop(graceful=False)


async def test_a_host_with_many_connections_closes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker elsewhere, with a slow network, keeps its place although its connection is the oldest."""
    monkeypatch.setattr(listener_module, "MAX_HANDSHAKES", 4)
    async with listening(RecordingHandler(), TcpAddress("0.0.0.0", 0)) as listener:  # noqa: S104  # for two addresses of one machine
        assert isinstance(listener.address, TcpAddress)
        port = listener.address.port
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        clients = [await connect(TcpAddress("127.0.0.1", port)) for _ in range(20)]
        assert await closed(clients[0]) == b""
        assert "127.0.0.2" in listener._handshakes.values()
        writer.close()
        await writer.wait_closed()


def test_the_metric_has_a_series_for_each_reason() -> None:
    reasons = [reason for literal in get_args(listener_module.JoinRefusal) for reason in get_args(literal)]
    assert sorted(reasons) == sorted(JOIN_REFUSALS)


# -- workers with the key that send invalid messages ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        (replace(READY, model=replace(MODEL, vocab_size=11)), "its vocab_size is 11, that of other workers 10"),
        (replace(READY, model=replace(MODEL, fingerprint="0" * 64)), "its fingerprint is '000"),
        (replace(READY, dtype="bfloat16", device="cuda:0"), "start the server with the same --dtype for all devices"),
        (replace(READY, kv_layout="another"), "stores keys and values in another layout"),
        (replace(READY, num_blocks=0), "reports 0 KV blocks"),
        (replace(READY, num_blocks=2**40), "reports 1099511627776 KV blocks"),
        (StepResult(0, 0, (7,), 0.0), "answered StepResult to its first message"),
        (WorkerFailed("there is no such directory", is_config_error=True), "there is no such directory"),
    ],
)
async def test_a_worker_with_another_model_or_another_answer_does_not_join(
    invalid: object, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    handler = RecordingHandler()
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        worker.send(invalid)  # type: ignore[arg-type]
        while listener.num_refused == 0:  # noqa: ASYNC110  # it has no event for that
            await asyncio.sleep(0.01)
        await worker.stream.end()
        assert handler.joined.empty() and listener.num_refused == 1 and len(handler.refusals) == 1
    assert expected in caplog.text


ADAPTERS = [LoraAdapter(number, f"/adapters/{name}", name * 16, name) for number, name in enumerate("ab")]


async def test_a_worker_that_has_all_adapters_joins() -> None:
    handler = RecordingHandler()
    handler.needed = ADAPTERS
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        assert isinstance(await worker.receive(), LoadModel)
        worker.send(READY)
        for adapter in ADAPTERS:
            assert handler.joined.empty()
            assert await worker.receive() == LoadAdapter(adapter)
            worker.send(AdapterLoaded("", adapter.fingerprint, 8))
        executor = await executor_of(handler)
        executor.send(PLAN)
        assert await worker.receive() == PLAN
        await executor.stop(graceful=False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (AdapterLoaded("'/adapters/b' holds no adapter"), "cannot serve the LoRA adapter 'b' in .* no adapter; copy"),
        (AdapterLoaded("", "another", 8), "adapter 'b', in /adapters/b, are not those of other workers"),
    ],
)
async def test_a_worker_without_an_adapter_is_refused_and_told_which(answer: AdapterLoaded, expected: str) -> None:
    handler = RecordingHandler()
    handler.needed = ADAPTERS
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        await worker.receive()
        worker.send(READY)
        await worker.receive()
        worker.send(AdapterLoaded("", ADAPTERS[0].fingerprint, 8))
        await worker.receive()
        worker.send(answer)
        refused = await worker.receive()
        assert isinstance(refused, Refused) and refused.reason == "other_adapters"
        assert re.search(expected, refused.message)
        await worker.stream.end()
        assert handler.joined.empty() and handler.refusals == ["other_adapters"]


async def test_a_worker_is_also_asked_about_the_adapters_that_are_loaded_while_it_is_asked() -> None:
    handler = RecordingHandler()
    handler.needed = ADAPTERS[:1]
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        await worker.receive()
        worker.send(READY)
        assert await worker.receive() == LoadAdapter(ADAPTERS[0])
        handler.needed = ADAPTERS
        worker.send(AdapterLoaded("", ADAPTERS[0].fingerprint, 8))
        assert await worker.receive() == LoadAdapter(ADAPTERS[1])
        worker.send(AdapterLoaded("there is none"))
        refused = await worker.receive()
        assert isinstance(refused, Refused) and refused.reason == "other_adapters"
        await worker.stream.end()
        assert handler.joined.empty()


async def test_strangers_do_not_hide_why_a_worker_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The log of strangers is full; the refusals of workers with the key are logged nevertheless."""
    handler = RecordingHandler()
    async with listening(handler) as listener:
        listener._log._next_s = math.inf
        await closed(await connect_and_send(listener.address, b"GET / HTTP/1.1\r\n\r\n"))
        worker = await StandInWorker.join(listener.address)
        assert isinstance(await worker.receive(), LoadModel)
        worker.send(replace(READY, dtype="bfloat16"))
        refused = await worker.receive()
        assert isinstance(refused, Refused) and refused.reason == "other_model" and "--dtype" in refused.message
        await worker.stream.end()
        handler.refuses = ("draining", "the server is draining")
        with pytest.raises(HandshakeFailed, match="draining"):
            await shake_hands(await connect(listener.address))
    assert "is not a worker" not in caplog.text and "one of servekit's worker protocol" not in caplog.text
    assert "--dtype" in caplog.text and "was refused: the server is draining" in caplog.text


async def connect_and_send(address: UnixAddress | TcpAddress, data: bytes) -> SocketStream:
    stream = await connect(address)
    stream.write(data)
    return stream


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (StepResult(0, 0, (10,), 0.0), "token id outside its vocabulary"),
        (StepResult(0, 0, (-1,), 0.0), "token id outside its vocabulary"),
        (StepResult(0, 0, (7,), math.nan), "reported a step of nan s"),  # would stay in the sums of metrics
        (StepResult(0, 0, (7,), math.inf), "reported a step of inf s"),
        (StepResult(0, 0, (7,), -1.0), "reported a step of -1 s"),
    ],
)
async def test_invalid_results_end_the_connection(result: StepResult, expected: str) -> None:
    handler = RecordingHandler()
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        worker.send(READY)
        executor = await executor_of(handler)
        executor.send(PLAN)
        worker.send(result)
        with pytest.raises(WorkerLost, match=expected):
            await executor.receive()
        await executor.stop(graceful=False)
        await worker.wait_ended()


async def test_a_frame_that_was_altered_on_its_way_ends_the_connection() -> None:
    handler = RecordingHandler()
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        worker.send(READY)
        executor = await executor_of(handler)
        worker.write(b"\x00\x00\x00\x14" + b"x" * 36)
        with pytest.raises(WorkerLost, match="wrong MAC"):
            await executor.receive()
        await executor.stop(graceful=False)


async def test_a_message_longer_than_any_result_ends_the_connection_at_its_header() -> None:
    handler = RecordingHandler()
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        worker.send(READY)
        executor = await executor_of(handler)
        limit = LOAD.max_answer_bytes
        worker.send_bytes(bytes(limit + 1), header_only=True)
        with pytest.raises(WorkerLost, match=f"the limit is {limit + 16}"):
            await executor.receive()
        await executor.stop(graceful=False)


async def test_the_model_of_the_first_worker_counts_when_the_server_has_none() -> None:
    handler = RecordingHandler(model=None)
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        assert await worker.receive() == LOAD
        worker.send(READY)
        assert (await handler.next_worker()).ready == READY


async def test_a_worker_that_loads_for_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    handler = RecordingHandler()
    async with listening(handler, load_timeout_s=0.2) as listener:
        worker = await StandInWorker.join(listener.address)
        await worker.wait_ended()
    assert "did not answer within 0.2 s" in caplog.text
    assert handler.refusals == ["load_failed"]


# -- the socket -------------------------------------------------------------------------------------------------------


async def test_only_this_user_may_connect_to_a_unix_socket_and_it_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "workers.sock"
    async with listening(RecordingHandler(), tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_a_socket_that_a_dead_server_left_is_replaced_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "workers.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with listening(RecordingHandler(), tmp_path):
        with pytest.raises(ConfigError, match="another server listens there"):
            async with listening(RecordingHandler(), tmp_path):
                pass
        assert path.exists()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "workers.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="cannot listen for workers on unix:"):
        async with listening(RecordingHandler(), UnixAddress(str(path))):
            pass
    assert path.read_text() == "precious"


async def test_stopping_closes_what_has_not_joined() -> None:
    async with listening(RecordingHandler()) as listener:
        client = await connect(listener.address)
        loading = await StandInWorker.join(listener.address)
        await loading.receive()
    assert await closed(client) == b""
    await loading.wait_ended()


def test_log_lines_about_refused_connections_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    limited = listener_module._RateLimitedLog(lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            limited.warning("refused")
        now_s = 2.0
        limited.warning("refused")
    assert [record.getMessage() for record in caplog.records] == [
        "refused",
        "refused (999 more since the last such line)",
    ]


# -- TLS --------------------------------------------------------------------------------------------------------------


async def test_a_worker_joins_over_tls_and_clients_without_it_do_not(certificate: tuple[str, str]) -> None:
    handler = RecordingHandler()
    async with listening(handler, tls=server_tls(*certificate)) as listener:
        worker = await StandInWorker.join(listener.address, worker_tls(certificate[0]))
        worker.send(READY)
        executor = await executor_of(handler)
        executor.send(PLAN)
        assert (await worker.receive(), await worker.receive())[1] == PLAN
        plain = await connect(listener.address)
        with pytest.raises((HandshakeFailed, EOFError, OSError, ValueError)):
            await shake_hands(plain)
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(listener.address, ssl.create_default_context())
        await executor.stop(graceful=False)


def test_certificates_that_cannot_be_used_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        server_tls("cert.pem", None)
    with pytest.raises(ConfigError, match="no certificate with its private key"):
        server_tls(str(tmp_path / "none"), str(tmp_path / "none"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match=r"--tls-ca = .*: no certificates"):
        worker_tls(str(tmp_path / "empty"))
    assert server_tls(None, None) is None and worker_tls(None) is None
    assert os.listdir(tmp_path) == ["empty"]
