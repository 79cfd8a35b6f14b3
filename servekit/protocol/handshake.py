"""Authenticate a worker that joins and its server to each other, before any other message. Pure.

Both have the same key. Each proves it by an HMAC-SHA256 over all messages before, which contain a fresh nonce of each
side:

    worker                                        server
      WorkerHello(version, nonce)          ──▶
                                           ◀──    ServerHello(version, nonce)
      WorkerProof(offer, mac)              ──▶
                                           ◀──    ServerProof(mac)      or at any time Refused(reason, message)

The two proofs have different labels, so a proof that is sent back (reflection) proves nothing. Both nonces are in both
proofs, so a proof from another handshake (replay) proves nothing. The worker proves first: a client without the key
gets no MAC from the server, and so cannot test guesses of the key.

Afterwards both sides seal every frame with keys that only this handshake gives (`SealedFrameCodec`).

`ServerHandshake` and `WorkerHandshake` do no I/O: they take one frame and return the next one. Which message is valid
when is one table. Randomness comes from the caller.
"""

from __future__ import annotations

import hmac
from enum import Enum, auto
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from servekit.errors import WorkerError
from servekit.protocol.frames import MAX_MESSAGE_BYTES
from servekit.protocol.sealed_frames import SealedFrameCodec, framed_digest

PROTOCOL_VERSION = 6
NONCE_BYTES = 32
MAX_HANDSHAKE_BYTES = 4096  # of one frame; the longest has some 1,100
MIN_KEY_BYTES = 32

# A reason in PERMANENT ends the worker, because a retry cannot succeed. For the others it tries again. other_adapters
# is one of these, because the operator can copy the files meanwhile.
Reason = Literal[
    "wrong_key",
    "other_version",
    "other_model",
    "other_size",
    "other_adapters",
    "invalid",
    "loading",
    "draining",
    "too_many",
]
PERMANENT: frozenset[Reason] = frozenset({"wrong_key", "other_version", "other_model", "other_size"})
MAX_REFUSAL_LENGTH = 500  # of its message, in characters

Role = Literal["", "prefill", "decode"]  # "": the server decides

_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Name = Annotated[str, Meta(max_length=100)]
_Address = Annotated[str, Meta(max_length=300)]  # the name of a host has 253 characters at most
_Rank = Annotated[int, Meta(ge=0, le=1024)]


class WorkerHello(Struct, frozen=True, tag="servekit_worker_hello"):
    """The first message of a worker. A later version of the protocol may add fields."""

    version: int
    nonce: _Nonce


class ServerHello(Struct, frozen=True, tag="servekit_server_hello"):
    """The server's answer: its challenge."""

    version: int
    nonce: _Nonce


class Offer(Struct, frozen=True):
    """Describe the worker that joins, for log lines and checks of versions. No field of it grants any right."""

    host: _Name
    device: _Name
    servekit_version: _Name
    torch_version: _Name = ""
    pid: int = 0
    # Of a group whose ranks are on several machines, each of them joins by itself: this one is `rank` of `num_ranks`.
    # Those that name the same rendezvous, the address at which rank 0 waits for the others, are one group.
    rendezvous: _Address = ""
    rank: _Rank = 0
    num_ranks: _Rank = 0  # 0: it has all ranks that the server asks for
    role: Role = ""  # what it is for, where prefill and decode are apart


class WorkerProof(Struct, frozen=True, tag="servekit_worker_proof"):
    """Prove that the worker has the key. The MAC covers both hellos and the offer."""

    offer: Offer
    mac: _Mac


class ServerProof(Struct, frozen=True, tag="servekit_server_proof"):
    """Prove that the server has the key, and accept the offer. The MAC covers the three messages before."""

    mac: _Mac


class Refused(Struct, frozen=True, tag="servekit_refused"):
    """The server does not accept the worker, and closes the connection.

    It ends a handshake. After a handshake, it is sealed, and answers what the worker has loaded.
    """

    reason: Reason
    message: Annotated[str, Meta(max_length=MAX_REFUSAL_LENGTH)]


HandshakeMessage = WorkerHello | ServerHello | WorkerProof | ServerProof | Refused


class State(Enum):
    """What a side waits for."""

    WORKER_HELLO = auto()
    WORKER_PROOF = auto()
    DECISION = auto()  # the server must decide whether it accepts an offer with a valid proof
    SERVER_HELLO = auto()
    SERVER_PROOF = auto()
    ACCEPTED = auto()
    REFUSED = auto()


# What follows each valid message. Every other message ends the handshake.
NEXT_STATE: dict[tuple[State, type[HandshakeMessage]], State] = {
    (State.WORKER_HELLO, WorkerHello): State.WORKER_PROOF,
    (State.WORKER_PROOF, WorkerProof): State.DECISION,
    (State.SERVER_HELLO, ServerHello): State.SERVER_PROOF,
    (State.SERVER_HELLO, Refused): State.REFUSED,
    (State.SERVER_PROOF, ServerProof): State.ACCEPTED,
    (State.SERVER_PROOF, Refused): State.REFUSED,
}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HandshakeMessage).decode


class _Handshake:
    """What both sides share: the state, the frames so far, and the key."""

    def __init__(self, key: bytes, nonce: bytes, state: State) -> None:
        assert len(key) >= MIN_KEY_BYTES and len(nonce) == NONCE_BYTES
        self.state = state
        self._key = key
        self._nonce = nonce
        self._frames: list[bytes] = []  # sent and received, in order: the transcript

    @property
    def is_accepted(self) -> bool:
        return self.state is State.ACCEPTED

    def _read(self, frame: bytes) -> HandshakeMessage:
        """Decode a frame and go on to the next state. Raises ValueError for a frame that is not valid in this state."""
        if len(frame) > MAX_HANDSHAKE_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes; the limit is {MAX_HANDSHAKE_BYTES}")
        message: HandshakeMessage = _decode(frame)
        state = NEXT_STATE.get((self.state, type(message)))
        if state is None:
            raise ValueError(f"{type(message).__name__} in place of {self.state.name}")
        # Each message has only one valid encoding. A hello may have fields of a later version; the proofs cover all of
        # it.
        if not isinstance(message, WorkerHello | ServerHello) and _encode(message) != frame:
            raise ValueError(f"{type(message).__name__} is not in its only valid encoding")
        self._frames.append(frame)
        self.state = state
        return message

    def _write(self, message: HandshakeMessage) -> bytes:
        frame = _encode(message)
        self._frames.append(frame)
        return frame

    def _mac(self, label: bytes, frames: list[bytes], extra: bytes = b"") -> bytes:
        """Return the HMAC over a label, which states what is proved, and frames of the transcript."""
        return hmac.digest(self._key, label + framed_digest([*frames, extra]), "sha256")

    def _worker_mac(self, offer: Offer) -> bytes:
        return self._mac(b"servekit worker proof ", self._frames[:2], _encode(offer))

    def _server_mac(self) -> bytes:
        return self._mac(b"servekit server proof ", self._frames[:3])

    def _session_keys(self) -> tuple[bytes, bytes]:
        """Return the keys of frames to the server and of frames to the worker."""
        assert self.state is State.ACCEPTED
        frames = self._frames[:3]
        return self._mac(b"servekit to the server ", frames), self._mac(b"servekit to the worker ", frames)


class ServerHandshake(_Handshake):
    """The server's side: `receive` twice, then `accept` or `refuse`."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        """`nonce` must be random, and used for nothing else."""
        super().__init__(key, nonce, State.WORKER_HELLO)
        self.offer: Offer | None = None  # of a worker that has proved the key

    def receive(self, frame: bytes) -> bytes | None:
        """Take the worker's next frame; return the answer, or None once the server must decide.

        Raises HandshakeFailed.
        """
        try:
            message = self._read(frame)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise self._fail("invalid", f"the message is not one of servekit's worker protocol ({error})") from None
        if isinstance(message, WorkerHello):
            if message.version != PROTOCOL_VERSION:
                raise self._fail(
                    "other_version",
                    f"the worker speaks version {message.version} of the worker protocol, and the server version "
                    f"{PROTOCOL_VERSION}; install the same servekit on both",
                )
            return self._write(ServerHello(PROTOCOL_VERSION, self._nonce))
        assert isinstance(message, WorkerProof)
        if not hmac.compare_digest(message.mac, self._worker_mac(message.offer)):
            raise self._fail(
                "wrong_key",
                "the worker's key is not the server's: --key-file of the worker and --worker-key-file of the server "
                "must hold the same key",
            )
        self.offer = message.offer
        return None

    def accept(self) -> bytes:
        """Accept the offer. Returns the frame that proves the key to the worker."""
        assert self.state is State.DECISION
        mac = self._server_mac()
        self.state = State.ACCEPTED
        return self._write(ServerProof(mac))

    def refuse(self, reason: Reason, message: str) -> bytes:
        """Refuse the worker. Returns the frame that gives it the reason."""
        self.state = State.REFUSED
        return self._write(Refused(reason, message[:MAX_REFUSAL_LENGTH]))

    def sealed_frames(self, max_bytes: int = MAX_MESSAGE_BYTES) -> SealedFrameCodec:
        """Return the codec of all further frames. Those of the worker may have `max_bytes`."""
        to_server, to_worker = self._session_keys()
        return SealedFrameCodec(send_key=to_worker, receive_key=to_server, max_bytes=max_bytes)

    def _fail(self, reason: Reason, message: str) -> HandshakeFailed:
        return HandshakeFailed(reason, message, self.refuse(reason, message))


class WorkerHandshake(_Handshake):
    """The worker's side: send `hello`, then `receive` twice."""

    def __init__(self, key: bytes, nonce: bytes, offer: Offer) -> None:
        """`nonce` must be random, and used for nothing else."""
        super().__init__(key, nonce, State.SERVER_HELLO)
        self._offer = offer

    def hello(self) -> bytes:
        """Return the first frame."""
        return self._write(WorkerHello(PROTOCOL_VERSION, self._nonce))

    def receive(self, frame: bytes) -> bytes | None:
        """Take the server's next frame; return the answer, or None once the server has accepted.

        Raises HandshakeFailed.
        """
        try:
            message = self._read(frame)
        except (ValueError, msgspec.DecodeError, RecursionError):
            self.state = State.REFUSED
            raise HandshakeFailed("invalid", NOT_SERVEKIT) from None
        if isinstance(message, Refused):
            raise HandshakeFailed(message.reason, message.message)
        if isinstance(message, ServerHello):
            if message.version != PROTOCOL_VERSION:
                self.state = State.REFUSED
                raise HandshakeFailed(
                    "other_version",
                    f"the server speaks version {message.version} of the worker protocol, and this worker version "
                    f"{PROTOCOL_VERSION}; install the same servekit on both",
                )
            return self._write(WorkerProof(self._offer, self._worker_mac(self._offer)))
        assert isinstance(message, ServerProof)
        if not hmac.compare_digest(message.mac, self._server_mac()):
            self.state = State.REFUSED
            raise HandshakeFailed(
                "wrong_key",
                "the peer does not have this worker's key: it is not this worker's server, or its messages were "
                "altered on the network",
            )
        return None

    def sealed_frames(self, max_bytes: int = MAX_MESSAGE_BYTES) -> SealedFrameCodec:
        """Return the codec of all further frames. Those of the server may have `max_bytes`."""
        to_server, to_worker = self._session_keys()
        return SealedFrameCodec(send_key=to_server, receive_key=to_worker, max_bytes=max_bytes)


NOT_SERVEKIT = "the peer is not a servekit server: --connect must be the address in its --listen-workers"


class HandshakeFailed(WorkerError):
    """The handshake has failed, and the worker has not joined. It is reported to the worker and in the log."""

    def __init__(self, reason: Reason, message: str, answer: bytes | None = None) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.answer = answer  # the frame that reports it to the other side

    @property
    def is_permanent(self) -> bool:
        """Whether another try also fails until the operator has changed something."""
        return self.reason in PERMANENT
