"""Claims about transfers between agents over TCP: blocks come as they were, or not at all, and nothing waits long."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from servekit.errors import ConfigError
from servekit.joining import block_receiver, block_sender, transfer_log
from servekit.joining.block_exchange import BlockExchange
from servekit.joining.block_receiver import BlockReceiver
from servekit.joining.block_sender import BlockSender
from servekit.joining.credentials import server_tls, worker_tls
from servekit.joining.transfer_settings import TransferSettings
from servekit.joining.transfer_socket import TransferSocket
from servekit.protocol.block_ring import BlockRing
from servekit.protocol.messages import BlocksFetched, FetchBlocks, LoadModel
from tests.support.timing import again_if_late, assert_within

BLOCK_BYTES = (40_004, 20_000)  # of two ranks
LAYOUTS = (b"layout of rank 0", b"layout of rank 1")
KEY, OTHER_KEY = b"0123456789abcdef" * 2, b"fedcba9876543210" * 2
KEYS = tuple(number.to_bytes(16) for number in range(1000, 1300))
ENOUGH_S = 60.0
Change = Callable[[bytes, int], bytes | None]  # (bytes on the way, how many came before) -> what goes on; None: the end


class Memory:
    """The rings of the two ranks of one worker."""

    def __init__(self, layouts: tuple[bytes, ...] = LAYOUTS, num_bytes: int = 2**25) -> None:
        self.fds = []
        for _ in BLOCK_BYTES:
            self.fds.append(os.memfd_create("test"))
            os.ftruncate(self.fds[-1], num_bytes)
        self.rings = [
            BlockRing(fd, size, layout, is_writer=True)
            for fd, size, layout in zip(self.fds, BLOCK_BYTES, layouts, strict=True)
        ]

    def append(self, *keys: bytes) -> None:
        for ring in self.rings:
            for key in keys:
                ring.rows[ring.next_rows(1)] = content(key, ring)
                ring.append([key])
                ring.refresh()

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def content(key: bytes, ring: BlockRing) -> np.ndarray:
    """What the block of a key consists of, which differs from rank to rank."""
    seed = [int.from_bytes(key), ring.block_bytes]
    return np.random.default_rng(seed).integers(0, 256, ring.rows.shape[1], np.uint8)


class Pair:
    """An agent with blocks and one that fetches them, and what that one reports."""

    def __init__(
        self,
        receiver_key: bytes = KEY,
        receiver_layouts: tuple[bytes, ...] = LAYOUTS,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self.source, self.target = Memory(), Memory(receiver_layouts)
        self.answers: queue.Queue[BlocksFetched] = queue.Queue()
        tls: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None)
        if certificate is not None:
            tls = server_tls(*certificate), worker_tls(certificate[0])
        self.sender = BlockSender(self.source.rings, KEY, ("127.0.0.1", 0), tls[0])
        self.receiver = BlockReceiver(self.target.rings, receiver_key, tls[1], self.answers.put)
        self.scheme = "tcp" if certificate is None else "tls"
        self.num_requests = 0

    def address(self, port: int | None = None) -> str:
        return f"{self.scheme}://127.0.0.1:{port or self.sender.port}"

    def begin(self, *keys: bytes, port: int | None = None) -> None:
        self.num_requests += 1
        self.receiver.fetch(FetchBlocks(self.num_requests, (self.address(port),), keys))

    def fetch(self, *keys: bytes, port: int | None = None) -> tuple[bytes, ...]:
        """Fetch blocks, and return the keys of those that came, after a check of what is in them."""
        self.begin(*keys, port=port)
        answer = self.answers.get(timeout=ENOUGH_S)
        assert answer.number == self.num_requests
        self.assert_right(*answer.keys)
        return answer.keys

    def assert_right(self, *keys: bytes) -> None:
        for ring in self.target.rings:
            reader = BlockRing(self.target.fds[self.target.rings.index(ring)], ring.block_bytes, ring.layout)
            assert all(key in reader for key in keys)
            blocks, is_found = reader.read(list(keys)) if keys else (np.zeros((0, 0)), np.ones(0, bool))
            assert is_found.all()
            for key, block in zip(keys, blocks, strict=True):
                assert (block[: ring.block_bytes] == content(key, ring)[: ring.block_bytes]).all()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.source.close()
        self.target.close()


@contextlib.contextmanager
def pairing(
    receiver_key: bytes = KEY, layouts: tuple[bytes, ...] = LAYOUTS, certificate: tuple[str, str] | None = None
) -> Iterator[Pair]:
    pair = Pair(receiver_key, layouts, certificate)
    try:
        yield pair
    finally:
        pair.close()


def accepted(listener: socket.socket) -> socket.socket:
    """Accept a connection. It and the wait for it have a limit of time."""
    listener.settimeout(ENOUGH_S)
    connected, _ = listener.accept()
    connected.settimeout(ENOUGH_S)
    return connected


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert_within(limit_s, time.monotonic() - began_s)


@contextlib.contextmanager
def proxy(port: int, change: Change) -> Iterator[int]:
    """Listen before a sender, and change what it sends: a machine between the two. Gives its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets = [listener]

    def forward(source: socket.socket, target: socket.socket, change: Change) -> None:
        num_before = 0
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                changed = change(data, num_before)
                num_before += len(data)
                if changed is None:
                    break
                target.sendall(changed)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                sockets.append(client)
                server = socket.create_connection(("127.0.0.1", port))
                sockets.append(server)
                threading.Thread(target=forward, args=(client, server, lambda data, _: data), daemon=True).start()
                threading.Thread(target=forward, args=(server, client, change), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_blocks_of_all_ranks_come_as_they_were_in_several_frames() -> None:
    with pairing() as pair:
        pair.source.append(*KEYS[:200])  # 12 MB, and a frame has 4
        assert pair.fetch(*KEYS[:200]) == KEYS[:200]
        pair.source.append(*KEYS[200:210])
        assert pair.fetch(*KEYS[190:210]) == KEYS[190:210], "over the same connection"
        assert len(pair.sender._connections) == 1
        for ring in pair.target.rings:
            assert len(ring) == 210, "what was there is not fetched again"


def test_blocks_come_through_tls(certificate: tuple[str, str]) -> None:
    with pairing(certificate=certificate) as pair:
        pair.source.append(*KEYS[:100])
        assert pair.fetch(*KEYS[:100]) == KEYS[:100]
        pair.scheme = "tcp"
        assert pair.fetch(*KEYS[100:101]) == (), "who expects no TLS gets nothing"


def test_blocks_after_one_that_is_missing_or_damaged_are_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    with pairing() as pair:
        pair.source.append(*KEYS[:5], *KEYS[6:10])
        assert pair.fetch(*KEYS[:10]) == KEYS[:5]
        assert f"{pair.address()} has 5 of the 10 KV blocks" in caplog.text
        pair.source.rings[1].rows[7, 5] ^= 1  # one rank's part is damaged
        assert pair.fetch(*KEYS[6:10]) == KEYS[6:10], "it has come before"
        pair.source.append(*KEYS[10:15])
        pair.source.rings[1].rows[11, 5] ^= 1
        assert pair.fetch(*KEYS[10:15]) == KEYS[10:12]


@pytest.mark.parametrize("at", [10, 300, 700, 800, 60_000, 3_000_000])
def test_a_transfer_of_which_a_byte_is_altered_is_not_used(at: int) -> None:
    """In the handshake, in the header of a frame, in its keys, and in blocks."""

    def alter(data: bytes, before: int) -> bytes:
        if before <= at < before + len(data):
            data = bytearray(data)
            data[at - before] ^= 1
        return bytes(data)

    with pairing() as pair, proxy(pair.sender.port, alter) as port:
        pair.source.append(*KEYS[:60])
        assert pair.fetch(*KEYS[:60], port=port) == ()
        assert len(pair.target.rings[0]) == 0
        assert pair.fetch(*KEYS[:60]) == KEYS[:60], "the next one, over another connection"


@pytest.mark.parametrize("at", [100, 700, 900, 2_000_000, 9_000_000])
def test_of_a_transfer_that_is_cut_off_whole_frames_are_used(at: int) -> None:
    with pairing() as pair, proxy(pair.sender.port, lambda data, before: None if before >= at else data) as port:
        pair.source.append(*KEYS[:200])
        came = pair.fetch(*KEYS[:200], port=port)
        assert came == KEYS[: len(came)] and len(came) < 200 and bool(came) == (at > 4 * 2**20)
        assert pair.fetch(*KEYS[:200]) == KEYS[:200]


@again_if_late
def test_a_peer_that_stalls_delays_no_other_one_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver, "STALL_TIMEOUT_S", 1.0)

    def stall(data: bytes, before: int) -> bytes:
        if before > 2**20:
            time.sleep(ENOUGH_S)
        return data

    with pairing() as pair, proxy(pair.sender.port, stall) as port:
        pair.source.append(*KEYS[:100])
        with within(0.2):  # the caller waits for nothing
            pair.begin(*KEYS[:50], port=port)
            pair.begin(*KEYS[50:60], port=port)
        with within(0.8):
            pair.begin(*KEYS[60:100])
            assert pair.answers.get(timeout=ENOUGH_S) == BlocksFetched(3, KEYS[60:100])
        with within(3.0):
            found = [pair.answers.get(timeout=ENOUGH_S) for _ in range(2)]
        assert found == [BlocksFetched(2), BlocksFetched(1)], "what waited for the same peer is given up at once"


@again_if_late
def test_a_peer_that_sends_byte_after_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver, "STALL_TIMEOUT_S", 1.0)

    def trickle(data: bytes, before: int) -> bytes:
        time.sleep(0.3 if before > 700 else 0.0)
        return data

    with pairing() as pair, proxy(pair.sender.port, trickle) as port:
        pair.source.append(*KEYS[:100])
        with within(3.0):
            assert pair.fetch(*KEYS[:60], port=port) == ()


@again_if_late
def test_the_time_of_a_fetch_begins_with_its_request_and_not_when_those_before_it_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the server would have given it up long before."""
    monkeypatch.setattr(block_receiver, "FETCH_TIMEOUT_S", 1.5)

    def delay(data: bytes, before: int) -> bytes:
        time.sleep(0.3 if before > 700 else 0.0)
        return data

    with pairing() as pair, proxy(pair.sender.port, delay) as port:
        pair.source.append(*KEYS[:12])
        with within(3.0):
            for key in KEYS[:12]:
                pair.begin(key, port=port)
            answers = {each.number: each.keys for each in (pair.answers.get(timeout=ENOUGH_S) for _ in range(12))}
        assert answers[12] == ()


def test_a_peer_that_has_started_again_is_connected_to_again() -> None:
    with pairing() as pair:
        pair.source.append(*KEYS[:6])
        assert pair.fetch(*KEYS[:2]) == KEYS[:2]
        for known in (2, 4):
            port = pair.sender.port
            pair.sender.close()
            pair.sender = BlockSender(pair.source.rings, KEY, ("127.0.0.1", port), None)
            assert pair.fetch(*KEYS[: known + 2]) == KEYS[: known + 2]
        pair.sender.close()
        assert pair.fetch(*KEYS[:7], port=port) == (), "it has not"


def test_a_peer_that_is_not_there_is_a_failed_transfer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pairing() as pair:
        assert pair.fetch(*KEYS[:3], port=port) == ()


def test_only_agents_of_the_same_server_get_blocks_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with pairing(receiver_key=OTHER_KEY) as pair:
        pair.source.append(*KEYS[:3])
        assert pair.fetch(*KEYS[:3]) == ()
    assert "the worker's key is not the server's" in caplog.text


def test_blocks_of_another_layout_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pairing(layouts=(LAYOUTS[0], LAYOUTS[0])) as pair:
        pair.source.append(*KEYS[:3])
        assert pair.fetch(*KEYS[:3]) == ()
    assert "stores keys and values in another way" in caplog.text


def test_a_worker_whose_ranks_are_on_several_machines_fetches_the_parts_of_each() -> None:
    with pairing() as pair:
        pair.source.append(*KEYS[:3])
        for number, ring in enumerate(pair.target.rings):
            answers: queue.Queue[BlocksFetched] = queue.Queue()
            receiver = BlockReceiver([ring], KEY, None, answers.put)
            receiver.fetch(FetchBlocks(number, (pair.address(),), KEYS[:3]))
            assert answers.get(timeout=ENOUGH_S) == BlocksFetched(number, KEYS[:3])
            receiver.close()
        pair.assert_right(*KEYS[:3])


def test_connections_without_the_key_are_closed_by_later_ones_and_workers_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_sender, "MAX_CONNECTIONS", 3)
    with pairing() as pair, contextlib.ExitStack() as stack:
        pair.source.append(*KEYS[:3])
        assert pair.fetch(*KEYS[:1]) == KEYS[:1]
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", pair.sender.port), timeout=ENOUGH_S))
            for _ in range(6)
        ]
        assert [each.recv(1) for each in idle[:4]] == [b""] * 4, "the oldest ones"
        assert pair.fetch(*KEYS[1:3]) == KEYS[1:3]
        assert len(pair.sender._connections) == 3


def test_the_log_says_that_more_agents_connect_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_sender, "MAX_CONNECTIONS", 1)
    with pairing() as pair:
        pair.source.append(*KEYS[:1])
        assert pair.fetch(*KEYS[:1]) == KEYS[:1]
        with socket.create_connection(("127.0.0.1", pair.sender.port), timeout=ENOUGH_S) as refused:
            assert refused.recv(1) == b""
        assert "1 other agents are connected, which is the limit for one worker" in caplog.text
        assert len(pair.sender._connections) == 1, "the one that has proved the key"


@again_if_late
def test_a_connection_that_proves_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sender, "HANDSHAKE_TIMEOUT_S", 0.5)
    with (
        pairing() as pair,
        within(5.0),
        socket.create_connection(("127.0.0.1", pair.sender.port), timeout=ENOUGH_S) as silent,
    ):
        silent.sendall(b"\0")
        assert silent.recv(1) == b""


def test_more_peers_than_there_may_be_and_more_requests_than_may_wait_are_failed_transfers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_receiver, "MAX_PEERS", 1)
    monkeypatch.setattr(block_receiver, "MAX_QUEUED", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pairing() as pair:
        port = silent.getsockname()[1]
        pair.begin(KEYS[0], port=port)
        connected = accepted(silent)
        for number in range(1, 6):
            pair.begin(KEYS[number], port=port)
        pair.begin(KEYS[9])
        refused = [pair.answers.get(timeout=ENOUGH_S) for _ in range(5)]
        assert sorted(each.number for each in refused) == [3, 4, 5, 6, 7]
        assert not any(each.keys for each in refused)
        lines = [line for line in caplog.messages if "are not fetched" in line]
        assert "1 fetches wait, which is the limit" in lines[0] and len(lines) < 5, "one line for those of one second"
        monkeypatch.setattr(transfer_log, "LOG_INTERVAL_S", 0.0)
        pair.begin(KEYS[9])
        assert "1 other workers are asked already" in caplog.text
        connected.close()


def test_while_no_thread_can_be_started_transfers_fail_and_later_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pairing() as pair:
        pair.source.append(*KEYS[:3])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_no_thread)
            assert pair.fetch(*KEYS[:3]) == () and "no thread can be started" in caplog.text
            with socket.create_connection(("127.0.0.1", pair.sender.port), timeout=ENOUGH_S) as refused:
                assert refused.recv(1) == b""
            assert "127.0.0.1 was refused, which asked for KV blocks: can't start new thread" in caplog.text
        assert pair.fetch(*KEYS[:3]) == KEYS[:3]


def test_each_connection_is_closed_by_the_thread_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, certificate: tuple[str, str]
) -> None:
    """Otherwise a thread could write TLS to the number of a file that is another one's by now."""
    closed: list[tuple[TransferSocket, str]] = []
    close = TransferSocket.close

    def noted(self: TransferSocket) -> None:
        close(self)
        closed.append((self, threading.current_thread().name))

    monkeypatch.setattr(TransferSocket, "close", noted)
    monkeypatch.setattr(block_sender, "MAX_CONNECTIONS", 2)
    with contextlib.ExitStack() as stack:
        with pairing(certificate=certificate) as pair:
            pair.source.append(*KEYS[:1])
            assert pair.fetch(*KEYS[:1]) == KEYS[:1]
            idle = [
                stack.enter_context(socket.create_connection(("127.0.0.1", pair.sender.port), timeout=ENOUGH_S))
                for _ in range(3)
            ]
            assert [each.recv(1) for each in idle[:2]] == [b""] * 2, "the oldest ones"
            connections = {*pair.sender._connections, *pair.receiver._connections.values()}
        deadline_s = time.monotonic() + ENOUGH_S
        while not connections <= {connection for connection, _ in closed}:
            assert time.monotonic() < deadline_s, "the end wakes the threads"
            time.sleep(0.01)
        assert all(connection._socket.fileno() == -1 for connection in connections)
    assert {name.partition(" from ")[0] for _, name in closed} == {"sends blocks", "fetches"}


def test_the_end_waits_for_no_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pairing() as pair:
        port = silent.getsockname()[1]
        pair.begin(KEYS[0], port=port)
        connected = accepted(silent)
        connected.recv(1)
        pair.receiver.close()
        assert pair.answers.get(timeout=block_receiver.CONNECT_TIMEOUT_S / 2) == BlocksFetched(1)
        for later in (port, None):
            assert pair.fetch(KEYS[1], port=later) == ()
        connected.close()


# -- memory ------------------------------------------------------------------------------------------------------------

LOAD = LoadModel("", "auto", "cpu", 16, 1, 1, None, 1, None, 0.9, tensor_parallel_size=2, kv_transfer_bytes=2**22)


def lay_out(load: LoadModel) -> None:
    """Do what the ranks of a worker do with the memory."""
    for rank in range(2):
        for fd in load.kv_transfer_fds[rank::2]:
            BlockRing(fd, BLOCK_BYTES[rank], LAYOUTS[rank], is_writer=True)


def test_a_worker_gets_an_outbox_and_an_inbox_and_both_are_given_back(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[BlocksFetched] = []
    exchange = BlockExchange(LOAD, KEY, TransferSettings("127.0.0.1"), None, answers.append)
    load = exchange.apply(LOAD)
    fds = load.kv_transfer_fds
    assert [os.fstat(fd).st_size for fd in fds] == [2**21] * 4
    assert (load.kv_transfer_own, load.kv_transfer_inbox) == (0, 1)
    exchange.fetch(FetchBlocks(5, ("tcp://127.0.0.1:1",), KEYS[:1]))
    assert answers == [BlocksFetched(5)] and "this worker is not ready" in caplog.text
    lay_out(load)
    address = exchange.open()
    assert address.startswith("tcp://127.0.0.1:")
    exchange.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_two_exchanges_of_one_server_hand_blocks_over(certificate: tuple[str, str]) -> None:
    answers: queue.Queue[BlocksFetched] = queue.Queue()
    settings = TransferSettings("127.0.0.1", server_tls=server_tls(*certificate))
    exchanges = [BlockExchange(LOAD, KEY, settings, worker_tls(certificate[0]), answers.put) for _ in range(2)]
    for exchange in exchanges:
        lay_out(exchange.apply(LOAD))
    addresses = [exchange.open() for exchange in exchanges]
    assert addresses[0].startswith("tls://")
    for fd in exchanges[0].fds[:2]:  # the worker's view of its outbox
        ring = BlockRing.attach(fd, is_writer=True)
        ring.rows[ring.next_rows(1)] = content(KEYS[0], ring)
        ring.append([KEYS[0]])
    exchanges[1].fetch(FetchBlocks(1, (addresses[0],), KEYS[:1]))
    assert answers.get(timeout=ENOUGH_S) == BlocksFetched(1, KEYS[:1])
    for fd in exchanges[1].fds[2:]:  # and of the other one's inbox
        ring = BlockRing.attach(fd)
        ((block,), _) = ring.read([KEYS[0]])
        assert (block[: ring.block_bytes] == content(KEYS[0], ring)[: ring.block_bytes]).all()
    for exchange in exchanges:
        exchange.close()


def test_an_agent_with_all_ranks_fetches_from_those_of_single_ranks_and_from_one_that_has_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever one rank lacks is not said to be there. All receivers write to the same memory."""
    answers: queue.Queue[BlocksFetched] = queue.Queue()
    settings = TransferSettings("127.0.0.1")
    loads = [replace(LOAD, local_rank=rank, rank=rank) for rank in range(2)]
    divided = [BlockExchange(load, KEY, settings, None, answers.put) for load in loads]
    for rank, exchange in enumerate(divided):
        for fd in exchange.fds:
            BlockRing(fd, BLOCK_BYTES[rank], LAYOUTS[rank], is_writer=True)
        append_to(exchange.fds[:1], KEYS[: 3 - rank])
    whole = [BlockExchange(LOAD, KEY, settings, None, answers.put) for _ in range(2)]
    for exchange in whole:
        lay_out(exchange.apply(LOAD))
    append_to(whole[1].fds[:2], KEYS[4:5])
    addresses, target = tuple(exchange.open() for exchange in divided), whole[0]
    target.open()
    target.fetch(FetchBlocks(1, addresses, KEYS[:3]))
    assert answers.get(timeout=ENOUGH_S) == BlocksFetched(1, KEYS[:2]), "the second rank has two blocks"
    target.fetch(FetchBlocks(2, (whole[1].open(),), KEYS[4:5]))
    assert answers.get(timeout=ENOUGH_S) == BlocksFetched(2, KEYS[4:5])
    append_to(divided[1].fds[:1], KEYS[2:3])
    target.fetch(FetchBlocks(3, addresses, KEYS[:3]))
    assert answers.get(timeout=ENOUGH_S) == BlocksFetched(3, KEYS[:3])
    for fd in target.fds[2:]:
        ring = BlockRing.attach(fd)
        wanted = [*KEYS[:3], KEYS[4]]
        blocks, is_right = ring.read(wanted)
        assert is_right.all() and ring.list_keys().count(KEYS[0]) == 1
        for key, block in zip(wanted, blocks, strict=True):
            assert (block[: ring.block_bytes] == content(key, ring)[: ring.block_bytes]).all()
    target.fetch(FetchBlocks(4, (*addresses, addresses[0]), KEYS[:1]))
    assert answers.get(timeout=ENOUGH_S) == BlocksFetched(4) and "from 3 agents, because this one has 2" in caplog.text
    for exchange in (*divided, *whole):
        exchange.close()


def append_to(fds: Sequence[int], keys: Sequence[bytes]) -> None:
    """Write blocks as ranks do, to the memory of each."""
    for fd in fds:
        ring = BlockRing.attach(fd, is_writer=True)
        ring.rows[ring.next_rows(len(keys))] = [content(key, ring) for key in keys]
        ring.append(list(keys))


def test_an_address_that_is_not_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        """As the kernel does, where it is not told to bind addresses that are not its own."""
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    exchange = BlockExchange(LOAD, KEY, TransferSettings("192.0.2.1"), None, lambda _: None)
    lay_out(exchange.apply(LOAD))
    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ConfigError, match=r"192.0.2.1 port 0: Cannot assign.*--transfer-address"):
        exchange.open()
    exchange.close()


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = BlockExchange(LOAD, KEY, TransferSettings("127.0.0.1"), None, lambda _: None)
    with pytest.raises(ConfigError, match=r"cannot be mapped: no process has laid out the memory"):
        exchange.open()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(BlockRing, "attach", refuse)
    with pytest.raises(ConfigError, match=r"cannot be mapped: Cannot allocate memory; .*--kv-transfer-memory-bytes"):
        exchange.open()
    exchange.close()


def test_without_a_thread_that_listens_a_worker_is_refused_and_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    exchange = BlockExchange(LOAD, KEY, TransferSettings("127.0.0.1", port), None, lambda _: None)
    lay_out(exchange.apply(LOAD))
    monkeypatch.setattr(threading.Thread, "start", start_no_thread)
    with pytest.raises(ConfigError, match=r"can't start new thread; raise the limit"):
        exchange.open()
    socket.create_server(("127.0.0.1", port)).close()
    exchange.close()


def start_no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_memory_that_cannot_be_reserved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"--kv-transfer-memory-bytes of the server\) cannot be reserved: Cannot"):
        BlockExchange(LOAD, KEY, TransferSettings("127.0.0.1"), None, lambda _: None)
    assert len(os.listdir("/proc/self/fd")) <= num_files, "fewer, if threads of earlier tests end only now"
