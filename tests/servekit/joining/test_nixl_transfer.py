"""Claims about real transfers with NIXL: blocks come undamaged, or over TCP, or not at all, and nothing waits long."""

from __future__ import annotations

import errno
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from servekit.joining import block_exchange, block_receiver, nixl_transfer
from servekit.joining.block_exchange import BlockExchange
from servekit.joining.block_receiver import BlockReceiver
from servekit.joining.block_sender import BlockSender
from servekit.joining.credentials import server_tls, worker_tls
from servekit.joining.nixl_process import BEGIN, END
from servekit.joining.nixl_transfer import NixlFailed, NixlReader, NixlReaders, NixlSource, has_nixl
from servekit.joining.transfer_settings import TransferSettings
from servekit.protocol.kv_transfer import RequestBlocks
from servekit.protocol.messages import BlocksFetched, FetchBlocks
from tests.servekit.joining.test_block_exchange import (
    ENOUGH_S,
    KEY,
    KEYS,
    LOAD,
    Memory,
    Pair,
    append_to,
    lay_out,
    proxy,
    within,
)
from tests.support import proc
from tests.support.timing import again_if_late

pytestmark = pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed: pip install 'servekit[nixl]'")

# A process with the blocks, as the agent on another machine. It writes its port, and ends with its standard input.
SENDER = """
import sys
from servekit.joining.block_sender import BlockSender
from servekit.joining.nixl_transfer import NixlSource
from servekit.protocol.block_ring import BlockRing

fds = [int(fd) for fd in sys.argv[2:]]
rings, source = [BlockRing.attach(fd) for fd in fds], NixlSource(fds)
source.metadata()
sender = BlockSender(rings, bytes.fromhex(sys.argv[1]), ("127.0.0.1", 0), None, source)
print(sender.port, flush=True)
sys.stdin.read()
sender.close()
source.close()
"""
TCP_ONLY = "tcp,self"  # as between machines without RDMA; by default, UCX uses faster transports on one machine


class NixlPair(Pair):
    """An agent with blocks and one that reads them with NIXL, in this process."""

    def __init__(self, certificate: tuple[str, str] | None = None) -> None:
        super().__init__(certificate=certificate)
        self.sender.close()
        self.receiver.close()
        self.nixl = NixlSource(self.source.fds)
        tls = (None, None) if certificate is None else (server_tls(*certificate), worker_tls(certificate[0]))
        self.sender = BlockSender(self.source.rings, KEY, ("127.0.0.1", 0), tls[0], self.nixl)
        self.readers = NixlReaders()
        self.receiver = BlockReceiver(self.target.rings, KEY, tls[1], self.answers.put, None, self.readers)

    def close(self) -> None:
        super().close()
        self.nixl.close()
        self.readers.close()


class Process(Pair):
    """An agent with blocks in another process, and one that reads them in this one."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver.close()
        self.readers = NixlReaders()
        self.receiver = BlockReceiver(self.target.rings, KEY, None, self.answers.put, None, self.readers)
        self.start()

    def start(self) -> None:
        fds = tuple(self.source.fds)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER, KEY.hex(), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            cwd=Path(__file__).parents[3],
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        super().close()
        self.readers.close()


@pytest.fixture(params=[None, TCP_ONLY], ids=["any transport", "TCP"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use any transport between two processes, or only that between machines without RDMA."""
    if request.param is not None:
        monkeypatch.setenv("UCX_TLS", request.param)


@pytest.mark.usefixtures("ways")
def test_blocks_of_all_ranks_come_from_another_process_and_not_over_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    num_bytes = []

    def count(data: bytes, _: int) -> bytes:
        num_bytes.append(len(data))
        return data

    with closing(Process()) as pair, proxy(pair.port, count) as port:
        pair.source.append(*KEYS[:200])  # 12 MB, of which 4 are read at once
        assert pair.fetch(*KEYS[:200], port=port) == KEYS[:200]
        pair.source.append(*KEYS[200:210])
        assert pair.fetch(*KEYS[190:210], port=port) == KEYS[190:210]
        assert sum(num_bytes) < 50_000
        assert caplog.text.count(f"KV blocks come from {pair.address(port)} over NIXL") == 1


def test_blocks_that_are_damaged_or_overwritten_after_the_answer_are_not_used() -> None:
    with closing(NixlPair()) as pair:
        pair.source.append(*KEYS[:10])
        pair.source.rings[1].rows[7, 5] ^= 1  # one rank's part
        assert pair.fetch(*KEYS[:10]) == KEYS[:7]
        assert pair.fetch(KEYS[9]) == (KEYS[9],)
        assert pair.fetch(KEYS[7]) == ()
        assert pair.fetch(*KEYS[20:22]) == (), "there are none"


def test_keys_and_places_come_through_tls(certificate: tuple[str, str]) -> None:
    with closing(NixlPair(certificate)) as pair:
        pair.source.append(*KEYS[:150])
        assert pair.fetch(*KEYS[:150]) == KEYS[:150]
        assert pair.receiver._readers


@again_if_late
@pytest.mark.usefixtures("ways")
def test_a_sender_that_is_killed_midway_loses_nothing() -> None:
    """Whole batches that came before are used. The others come from the next process with the same blocks."""
    with closing(Process()) as pair:
        pair.source.append(*KEYS)  # 18 MB
        was_killed = threading.Event()
        children = proc.children(pair.process.pid)

        def kill(data: bytes, before: int) -> bytes:
            if before > 4_000 and not was_killed.is_set():  # the first answers of blocks have come
                pair.process.kill()
                was_killed.set()
            return data

        with proxy(pair.port, kill) as port, within(8.0):
            came = pair.fetch(*KEYS, port=port)
        assert was_killed.is_set() and came == KEYS[: len(came)] and len(came) < len(KEYS)
        pair.process.communicate()
        proc.wait_until_gone(*children)
        pair.start()
        assert pair.fetch(*KEYS, port=pair.port) == KEYS
        assert pair.receiver._readers, "NIXL is used: that a peer was lost is no failure of NIXL"


@again_if_late
def test_a_read_that_stalls_is_given_up_and_tcp_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way ends. UCX may abort the process that was stopped: then another one is started."""
    monkeypatch.setenv("UCX_TLS", TCP_ONLY)
    with closing(Process()) as pair:
        pair.source.append(*KEYS[:200])
        assert pair.fetch(*KEYS[:10], port=pair.port) == KEYS[:10]
        monkeypatch.setattr(block_receiver, "STALL_TIMEOUT_S", 1.0)
        readers = list(pair.receiver._readers.values())
        (source,) = proc.children(pair.process.pid)
        os.kill(source, signal.SIGSTOP)
        with within(4.0):
            assert pair.fetch(*KEYS[10:200], port=pair.port) == KEYS[10:200]
        assert all(reader.has_ended for reader in readers) and not pair.receiver._readers
        os.kill(source, signal.SIGCONT)
        monkeypatch.setattr(block_receiver, "STALL_TIMEOUT_S", ENOUGH_S)  # to start another process takes a second
        for number in range(200, 300):
            pair.receiver._tcp_until_s.clear()
            pair.source.append(KEYS[number])
            assert pair.fetch(KEYS[number], port=pair.port) == (KEYS[number],)
            if pair.receiver._readers:
                break
        assert pair.receiver._readers, "with NIXL again"


def test_after_nixl_has_failed_tcp_is_used_for_a_while_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    num_tries = 0

    def fail(*_: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise NixlFailed("there is no way to it")

    with closing(NixlPair()) as pair:
        pair.source.append(*KEYS[:100])
        with monkeypatch.context() as patched:
            patched.setattr(NixlReader, "read", fail)
            assert pair.fetch(*KEYS[:80]) == KEYS[:80]
            assert pair.fetch(*KEYS[:90]) == KEYS[:90]
        lines = [record.message for record in caplog.records if "over TCP" in record.message]
        assert num_tries == 1 and len(lines) == 1 and "NIXL failed: there is no way to it" in lines[0]
        pair.receiver._tcp_until_s[pair.address()] = 0.0  # as if the pause was over
        assert pair.fetch(*KEYS[90:100]) == KEYS[90:100]
        assert pair.receiver._readers


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_if_only_one_side_uses_nixl_blocks_come_over_tcp_and_one_line_says_so(
    who: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with closing(NixlPair()) as pair:
        if who == "receiver":  # is the one that uses it
            pair.sender._nixl = None
        else:
            pair.receiver._nixl = None
        pair.source.append(*KEYS[:100])
        assert pair.fetch(*KEYS[:90]) == KEYS[:90]
        assert pair.fetch(*KEYS[:100]) == KEYS[:100]
        assert not pair.receiver._readers
    assert caplog.text.count("over TCP, because its worker was not started") == (who == "receiver")


def test_the_process_with_the_blocks_uses_no_processor_when_nothing_is_read() -> None:
    """UCX polls, so it would otherwise take a part of a core from the worker."""
    with closing(NixlPair()) as pair:
        pair.source.append(*KEYS[:200])
        assert pair.fetch(*KEYS[:200]) == KEYS[:200]
        assert pair.nixl._process is not None
        pid, deadline_s = pair.nixl._process.pid, time.monotonic() + ENOUGH_S
        before_s = 0.0
        while (now_s := proc.cpu_s(pid)) > before_s + 0.01:
            assert time.monotonic() < deadline_s
            before_s = now_s
            time.sleep(1.0)


@pytest.mark.parametrize("role", ["source", "reader"])
def test_a_process_that_is_killed_is_started_again(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(NixlPair()) as pair:
        pair.source.append(*KEYS[:10])
        assert pair.fetch(*KEYS[:5]) == KEYS[:5]
        (reader,) = pair.receiver._readers.values()
        assert pair.nixl._process is not None
        process = pair.nixl._process if role == "source" else reader._process
        os.kill(process.pid, signal.SIGKILL)
        while not process.has_ended:
            time.sleep(0.01)
        assert pair.fetch(*KEYS[:10]) == KEYS[:10]
        pair.receiver._tcp_until_s.clear()  # after a reader was lost
        pair.source.append(*KEYS[10:20])
        assert pair.fetch(*KEYS[:20]) == KEYS[:20]
        (reader,) = pair.receiver._readers.values()
        assert process not in (reader._process, pair.nixl._process)


@again_if_late
def test_a_process_that_does_not_start_leaves_time_for_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver, "FETCH_TIMEOUT_S", 4.0)
    monkeypatch.setattr(block_receiver, "STALL_TIMEOUT_S", 2.0)
    with closing(NixlPair()) as pair:
        pair.source.append(*KEYS[:10])
        pair.nixl.metadata()  # the other process has started
        assert pair.readers._next is not None
        os.kill(pair.readers._next._process.pid, signal.SIGSTOP)
        with within(4.0):
            assert pair.fetch(*KEYS[:10]) == KEYS[:10]


def test_the_processes_that_peers_reach_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    with closing(NixlPair()) as pair:
        pair.source.append(*KEYS[:3])
        assert pair.fetch(*KEYS[:3]) == KEYS[:3]
        (reader,) = pair.receiver._readers.values()
        assert pair.nixl._process is not None
        for process in (reader._process, pair.nixl._process):
            assert "UCX_LOG_LEVEL" in proc.read(process.pid, "environ")
            assert "a secret" not in proc.read(process.pid, "environ")


def test_all_that_was_opened_is_closed() -> None:
    with closing(NixlPair()) as pair:  # libraries stay loaded, with files of their own
        pair.source.append(*KEYS[:3])
        assert pair.fetch(*KEYS[:3]) == KEYS[:3]
    before = None
    for _ in range(3):
        with closing(NixlPair()) as pair:
            pair.source.append(*KEYS[:3])
            assert pair.fetch(*KEYS[:3]) == KEYS[:3]
        deadline_s = time.monotonic() + ENOUGH_S
        while any(each.name.startswith(("fetches", "sends", "accepts")) for each in threading.enumerate()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        num_files = len(os.listdir("/proc/self/fd"))
        assert before is None or num_files <= before
        before = num_files


def test_memory_that_the_peer_does_not_have_is_a_failed_read() -> None:
    memory = Memory()
    source = NixlSource(memory.fds)
    metadata, (first_row, _) = source.metadata()
    for wrong, address in ((metadata, first_row + 2**40), (b"something else", first_row)):
        reader = NixlReader()
        reader.connect(wrong, 2**20, time.monotonic() + ENOUGH_S, lambda: None)
        places, sizes = np.array([[address], [100]], np.uint64)
        with pytest.raises(NixlFailed):
            reader.read(places, sizes, time.monotonic() + ENOUGH_S, lambda: None)
        reader.close()
    source.close()
    memory.close()


@pytest.mark.parametrize("is_missing", [False, True], ids=["installed", "not installed"])
def test_two_agents_use_nixl_if_it_is_installed(
    is_missing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if is_missing:
        monkeypatch.setattr(block_exchange, "has_nixl", lambda: False)
    answers: queue.Queue[BlocksFetched] = queue.Queue()
    settings = TransferSettings("127.0.0.1", uses_nixl=True)
    exchanges = [BlockExchange(LOAD, KEY, settings, None, answers.put) for _ in range(2)]
    for exchange in exchanges:
        lay_out(exchange.apply(LOAD))
    append_to(exchanges[0].fds[:2], KEYS[:5])
    address = exchanges[0].open()
    exchanges[1].open()
    exchanges[1].fetch(FetchBlocks(1, (address,), KEYS[:5]))
    assert answers.get(timeout=ENOUGH_S) == BlocksFetched(1, KEYS[:5])
    assert ("over NIXL" in caplog.text) == (not is_missing)
    assert caplog.text.count("it is not installed (pip install 'servekit[nixl]')") == 2 * is_missing
    for exchange in exchanges:
        exchange.close()


class NotedProcess:
    """Stands in for the process of a source, and records the messages that it gets."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.has_ended = False

    def order(self, message: bytes, ends_s: float, check: Callable[[], None]) -> bytes:
        return msgspec.msgpack.encode((b"metadata", [0] * 8))

    def send(self, message: bytes) -> None:
        self.told.append(message)

    def kill(self) -> None:
        self.has_ended = True

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[NotedProcess]:
    """Those that sources start."""
    started: list[NotedProcess] = []

    def start(*_: object) -> NotedProcess:
        started.append(NotedProcess())
        return started[-1]

    monkeypatch.setattr(nixl_transfer, "_Process", start)
    return started


def test_the_end_of_a_read_is_not_told_to_the_successor_of_the_process_that_had_it(
    processes: list[NotedProcess],
) -> None:
    """It would count one read less than there are, and not answer while its own only one is under way."""
    source = NixlSource([])
    source.metadata()
    lost = source.begin()
    processes[0].has_ended = True
    source.metadata()
    reading = source.begin()
    source.end(lost)
    assert processes[1].told == [BEGIN]
    source.end(reading)
    assert processes[0].told == [BEGIN] and processes[1].told == [BEGIN, END]
    source.close()


class LostPeer:
    """The connection to a peer that asks for blocks, and is gone when the answer is sent."""

    def __init__(self, request: RequestBlocks) -> None:
        self._request = request

    def receive(self, ends_s: float) -> bytes:
        return msgspec.msgpack.encode(self._request)

    def send(self, *payload: bytes, ends_s: float) -> None:
        raise BrokenPipeError


def test_a_peer_that_is_gone_before_its_answer_leaves_no_read_under_way(processes: list[NotedProcess]) -> None:
    """Otherwise the process with the blocks would look for its messages for ever."""
    with closing(Pair()) as pair:
        pair.source.append(KEYS[0])
        source = pair.sender._nixl = NixlSource([])
        request = RequestBlocks(tuple(pair.sender._rings), (KEYS[0],), by_nixl=True)
        with pytest.raises(BrokenPipeError):
            pair.sender._serve(LostPeer(request))  # type: ignore[arg-type]
        assert processes[0].told == [BEGIN, END]
        source.close()


@pytest.mark.parametrize("what", ["socketpair", "open_memory"])
def test_where_no_file_can_be_opened_nixl_has_failed_so_that_tcp_is_used(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket if what == "socketpair" else nixl_transfer, what, fail)
    with pytest.raises(NixlFailed, match=os.strerror(errno.EMFILE)):
        NixlReader()
