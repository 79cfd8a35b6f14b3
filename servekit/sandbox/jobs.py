"""Messages between the server and its sandbox processes: frozen values, encoded as msgpack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from servekit.requests.generation import Grammar, GrammarKind

MESSAGES_PER_PIECE = 64
PIECE_CHARACTERS = 2**15  # of one text; encoding them takes a tenth of a millisecond


class RenderChat(Struct, frozen=True, tag="render_chat"):
    """Render a conversation as the text that the model was trained on."""

    template: str
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    messages: list[dict[str, Any]]  # the last field: see `encode_job`


class CompileGrammar(Struct, frozen=True, tag="compile_grammar"):
    """Translate a grammar into the form that the worker accepts, and check that it compiles."""

    kind: GrammarKind
    text: str
    parts: tuple[Grammar, ...] = ()


class Done(Struct, frozen=True, tag="done"):
    """The result of a job that makes a short text."""

    text: str


class DoneLong(Struct, frozen=True, tag="done_long"):
    """The result of a job that makes text of any length. The event loop decodes it in slices."""

    utf8: memoryview


class Refused(Struct, frozen=True, tag="refused"):
    """The reason why a job's input is invalid."""

    message: str
    code: str | None = None  # the error's code, if it is not that of an invalid value


Job = RenderChat | CompileGrammar
Outcome = Done | DoneLong | Refused


# -- between the server and the process that forks the others ----------------------------------------------------------


class Fork(Struct, frozen=True, tag="fork"):
    """Fork a process that runs jobs. Its end of a socket comes with this message. The answer is Forked."""


class End(Struct, frozen=True, tag="end"):
    """Ask for the exit code of a forked process.

    If it has not exited and `kill` is set, kill it. The answer is Ended.
    """

    pid: int
    kill: bool


class ForkServerReady(Struct, frozen=True, tag="ready"):
    """The process can fork others. `warnings` tell which kinds of jobs they will refuse, and why."""

    warnings: list[str]


class Forked(Struct, frozen=True, tag="forked"):
    pid: int


class Ended(Struct, frozen=True, tag="ended"):
    """`exit_code` is negative for a signal, and None if the process had not exited."""

    exit_code: int | None


ToForkServer = Fork | End
FromForkServer = ForkServerReady | Forked | Ended


def encode_job(job: Job) -> Iterator[bytes | bytearray]:
    """Encode a job in pieces, so that the event loop is free between them. Raises ValueError, OverflowError, TypeError.

    A long conversation takes 30 ms and more to encode. msgpack writes an array as the number of its elements and the
    elements, and a Struct as its fields in order. So an array that comes last can be appended in pieces. All pieces
    together are the job: the length of a long text is filled in when the text is encoded.
    """
    if not isinstance(job, RenderChat):
        yield msgspec.msgpack.encode(job)
        return
    head = msgspec.msgpack.encode(msgspec.structs.replace(job, messages=[]))
    assert head.endswith(b"\x90"), "an empty array"
    piece, num_messages = bytearray(head[:-1] + b"\xdd" + len(job.messages).to_bytes(4, "big")), 0
    for message in job.messages:
        if any(isinstance(value, str) and len(value) > PIECE_CHARACTERS for value in message.values()):
            yield piece
            yield from _pieces_of_long(message)
            piece, num_messages = bytearray(), 0
            continue
        piece += msgspec.msgpack.encode(message)
        num_messages += 1
        if num_messages == MESSAGES_PER_PIECE or len(piece) >= PIECE_CHARACTERS:
            yield piece
            piece, num_messages = bytearray(), 0
    if piece:
        yield piece


def _pieces_of_long(message: dict[str, Any]) -> Iterator[bytes | bytearray]:
    """Encode a message with long texts, a map whose entries keep their order: templates may show it."""
    yield b"\xdf" + len(message).to_bytes(4, "big")
    for key, value in message.items():
        yield msgspec.msgpack.encode(key)
        if not isinstance(value, str):
            yield msgspec.msgpack.encode(value)
            continue
        length, num_bytes = bytearray(b"\xdb\0\0\0\0"), 0
        yield length
        for start in range(0, len(value), PIECE_CHARACTERS):
            utf8 = value[start : start + PIECE_CHARACTERS].encode()
            num_bytes += len(utf8)
            yield utf8
        length[1:] = num_bytes.to_bytes(4, "big")
