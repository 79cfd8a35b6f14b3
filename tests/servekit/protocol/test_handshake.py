"""Tests of the handshake: no message that is altered, cut, replayed, reflected or out of order is accepted."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    NEXT_STATE,
    PROTOCOL_VERSION,
    HandshakeFailed,
    Offer,
    Refused,
    ServerHandshake,
    ServerHello,
    ServerProof,
    State,
    WorkerHandshake,
    WorkerHello,
    WorkerProof,
)
from tests.servekit.protocol.test_frames import framed

KEY = b"k" * 32
OFFER = Offer("gpu-7", "cuda:1", "1.0", "2.9.0", 77)


def make_sides(worker_key: bytes = KEY, server_key: bytes = KEY) -> tuple[WorkerHandshake, ServerHandshake]:
    return WorkerHandshake(worker_key, os.urandom(32), OFFER), ServerHandshake(server_key, os.urandom(32))


def converse(worker: WorkerHandshake, server: ServerHandshake) -> list[bytes]:
    """A whole handshake; returns its four frames."""
    frames = [worker.hello()]
    for side in (server, worker):
        answer = side.receive(frames[-1])
        assert answer is not None
        frames.append(answer)
    assert server.receive(frames[-1]) is None and server.state is State.DECISION
    frames.append(server.accept())
    assert worker.receive(frames[-1]) is None
    return frames


def test_two_sides_with_one_key_accept_each_other_and_read_each_others_frames() -> None:
    worker, server = make_sides()
    converse(worker, server)
    assert worker.state is server.state is State.ACCEPTED and server.offer == OFFER
    assert worker.is_accepted and server.is_accepted
    of_worker, of_server = worker.sealed_frames(), server.sealed_frames()
    for payload in (b"", b"plan", b"x" * 100_000):
        assert of_worker.decode(framed(of_server, payload)) == [payload]
        assert of_server.decode(framed(of_worker, payload)) == [payload]


def test_a_worker_with_another_key_is_refused_and_both_sides_say_why() -> None:
    worker, server = make_sides(worker_key=b"other" * 8)
    challenge = server.receive(worker.hello())
    assert challenge is not None
    proof = worker.receive(challenge)
    assert proof is not None
    with pytest.raises(HandshakeFailed, match="key is not the server's") as refused:
        server.receive(proof)
    assert refused.value.answer is not None and server.state is State.REFUSED and server.offer is None
    with pytest.raises(HandshakeFailed, match="key is not the server's") as on_worker:
        worker.receive(refused.value.answer)
    assert on_worker.value.is_permanent and on_worker.value.reason == "wrong_key"


def test_a_server_without_the_key_is_refused() -> None:
    """It answers like a server, but cannot make a valid proof."""
    worker, _ = make_sides()
    liar = ServerHandshake(b"other" * 8, os.urandom(32))
    challenge = liar.receive(worker.hello())
    assert challenge is not None and worker.receive(challenge) is not None
    liar.state = State.DECISION
    with pytest.raises(HandshakeFailed, match="does not have this worker's key"):
        worker.receive(liar.accept())
    assert worker.state is State.REFUSED


@settings(max_examples=300, deadline=None)
@given(
    number=st.integers(0, 3),
    position=st.integers(0, 10_000),
    change=st.integers(1, 255),
    cut=st.booleans(),
)
def test_any_altered_or_truncated_frame_is_refused(number: int, position: int, change: int, cut: bool) -> None:
    """The receiver refuses it, or the next proof does not match, because it covers the frame."""
    worker, server = make_sides()

    def on_the_way(index: int, frame: bytes) -> bytes:
        if index != number:
            return frame
        at = position % len(frame)
        return frame[:at] if cut else frame[:at] + bytes([frame[at] ^ change]) + frame[at + 1 :]

    def converse_over_it() -> None:
        challenge = server.receive(on_the_way(0, worker.hello()))
        assert challenge is not None
        proof = worker.receive(on_the_way(1, challenge))
        assert proof is not None
        server.receive(on_the_way(2, proof))
        worker.receive(on_the_way(3, server.accept()))

    with pytest.raises(HandshakeFailed):
        converse_over_it()
    assert worker.state is not State.ACCEPTED
    assert server.state is not State.ACCEPTED or number == 3


def test_frames_of_an_earlier_handshake_are_refused() -> None:
    old = converse(*make_sides())
    _, server = make_sides()
    assert server.receive(old[0]) is not None
    with pytest.raises(HandshakeFailed, match="key"):
        server.receive(old[2])
    worker, _ = make_sides()
    worker.hello()
    assert worker.receive(old[1]) is not None
    with pytest.raises(HandshakeFailed, match="key"):
        worker.receive(old[3])


def test_frames_that_are_sent_back_to_their_sender_are_refused() -> None:
    worker, server = make_sides()
    hello = worker.hello()
    with pytest.raises(HandshakeFailed):
        worker.receive(hello)
    worker, server = make_sides()
    challenge = server.receive(worker.hello())
    assert challenge is not None
    with pytest.raises(HandshakeFailed):
        server.receive(challenge)
    worker, server = make_sides()
    challenge = server.receive(worker.hello())
    assert challenge is not None
    proof = worker.receive(challenge)
    assert proof is not None
    with pytest.raises(HandshakeFailed):
        worker.receive(proof)


def test_a_proof_with_a_field_that_no_mac_covers_is_refused() -> None:
    worker, server = make_sides()
    challenge = server.receive(worker.hello())
    assert challenge is not None
    proof = worker.receive(challenge)
    assert proof is not None
    more = {**msgspec.msgpack.decode(proof), "more": 1}
    with pytest.raises(HandshakeFailed, match="not in its only valid encoding"):
        server.receive(msgspec.msgpack.encode(more))


def test_the_mac_of_a_worker_is_none_of_a_server() -> None:
    """A false server that has no key sends the worker's own MAC back, as its proof."""
    worker, server = make_sides()
    challenge = server.receive(worker.hello())
    assert challenge is not None
    proof = worker.receive(challenge)
    assert proof is not None
    mac = msgspec.msgpack.decode(proof, type=WorkerProof).mac
    with pytest.raises(HandshakeFailed, match="does not have this worker's key"):
        worker.receive(msgspec.msgpack.encode(ServerProof(mac)))


def test_a_worker_that_relays_another_workers_proof_has_no_keys() -> None:
    """A machine between the two can relay the handshake, but has no session keys, and so cannot alter a frame."""
    worker, server = make_sides()
    converse(worker, server)
    sealed = framed(worker.sealed_frames(), b"result")
    with pytest.raises(ValueError, match="MAC"):
        server.sealed_frames().decode(sealed[:-1] + bytes([sealed[-1] ^ 1]))


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)], ids=["swapped", "repeated", "left out"])
def test_sealed_frames_out_of_order_are_refused(order: tuple[int, ...]) -> None:
    worker, server = make_sides()
    converse(worker, server)
    sender, receiver = worker.sealed_frames(), server.sealed_frames()
    frames = [framed(sender, b"first"), framed(sender, b"second")]
    with pytest.raises(ValueError, match="MAC"):
        receiver.decode(b"".join(frames[index] for index in order))
    echoed = worker.sealed_frames()
    with pytest.raises(ValueError, match="MAC"):
        worker.sealed_frames().decode(framed(echoed, b"sent back"))


@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=300), is_second=st.booleans())
def test_garbage_is_refused_on_both_sides(garbage: bytes, is_second: bool) -> None:
    worker, server = make_sides()
    hello = worker.hello()
    if is_second:
        challenge = server.receive(hello)
        assert challenge is not None
        worker.receive(challenge)
    for side in (worker, server):
        with pytest.raises(HandshakeFailed):
            side.receive(garbage)
        assert side.state is State.REFUSED


def test_a_frame_over_the_limit_is_refused_before_it_is_decoded() -> None:
    _, server = make_sides()
    with pytest.raises(HandshakeFailed, match="4097 bytes"):
        server.receive(b"\x00" * (MAX_HANDSHAKE_BYTES + 1))


def test_another_version_is_refused_on_both_sides_even_with_fields_that_this_one_does_not_know() -> None:
    _, server = make_sides()
    later = {"type": "servekit_worker_hello", "version": PROTOCOL_VERSION + 1, "nonce": b"n" * 32, "more": [1]}
    with pytest.raises(HandshakeFailed, match=f"speaks version {PROTOCOL_VERSION + 1}") as refused:
        server.receive(msgspec.msgpack.encode(later))
    assert refused.value.is_permanent
    worker, _ = make_sides()
    worker.hello()
    with pytest.raises(HandshakeFailed, match="server speaks version 7"):
        worker.receive(msgspec.msgpack.encode(ServerHello(7, b"n" * 32)))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_the_error_says_that_a_peer_is_not_a_servekit_server(answer: bytes) -> None:
    worker, _ = make_sides()
    worker.hello()
    with pytest.raises(HandshakeFailed, match="not a servekit server") as failed:
        worker.receive(answer)
    assert not failed.value.is_permanent  # a proxy may answer while the server restarts


def test_a_refusal_after_the_proof_reaches_the_worker() -> None:
    worker, server = make_sides()
    challenge = server.receive(worker.hello())
    assert challenge is not None
    proof = worker.receive(challenge)
    assert proof is not None and server.receive(proof) is None
    with pytest.raises(HandshakeFailed, match="draining") as refused:
        worker.receive(server.refuse("draining", "the server is draining"))
    assert not refused.value.is_permanent and worker.state is State.REFUSED


def test_nothing_follows_the_end_of_a_handshake() -> None:
    """The table has no way out of ACCEPTED, of REFUSED, and of the server's decision."""
    assert not {state for state, _ in NEXT_STATE} & {State.ACCEPTED, State.REFUSED, State.DECISION}
    worker, server = make_sides()
    frames = converse(worker, server)
    for side in (worker, server):
        for frame in (*frames, msgspec.msgpack.encode(Refused("invalid", ""))):
            with pytest.raises(HandshakeFailed):
                side.receive(frame)


def test_a_nonce_of_another_length_is_refused() -> None:
    _, server = make_sides()
    with pytest.raises(HandshakeFailed, match="not one of servekit's"):
        server.receive(msgspec.msgpack.encode(WorkerHello(PROTOCOL_VERSION, b"short")))
