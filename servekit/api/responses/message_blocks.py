"""Read a chat's answer as a sequence of blocks (reasoning, texts, tool calls) that begin, grow and end.

Anthropic's API and OpenAI's Responses write answers in this way, streamed or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from msgspec import Struct

from servekit.api.responses.chat_message import ChatMessageReader, new_call_id
from servekit.api.responses.collect import Answer
from servekit.engine.client_queue import TokenDelta
from servekit.parsing.answer_events import CallArguments, CallBegins, Content, Reasoning
from servekit.parsing.chat_format import AnswerFormat


class BlockKind(Enum):
    """What a block is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Block:
    """One block of an answer, as far as it is. A call has the name of a function; its text is the arguments."""

    __slots__ = ("_pieces", "call_id", "index", "kind", "name")

    def __init__(self, index: int, kind: BlockKind, name: str = "", call_id: str = "") -> None:
        self.index = index
        self.kind = kind
        self.name = name
        self.call_id = call_id
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        self._pieces.append(text)


class BlockBegins(Struct, frozen=True, gc=False):
    """A block begins, without any text."""

    block: Block


class BlockGrows(Struct, frozen=True, gc=False):
    """A block has more text."""

    block: Block
    text: str


class BlockEnds(Struct, frozen=True, gc=False):
    """A block is complete."""

    block: Block


BlockEvent = BlockBegins | BlockGrows | BlockEnds


class BlockReader:
    """Turns the tokens of one answer into blocks. One block is open at a time."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._reader = ChatMessageReader(answer_format.make_parser())
        self._call_id_length = answer_format.call_id_length
        self._events: list[BlockEvent] = []
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.num_tokens = 0

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def has_calls(self) -> bool:
        return self._reader.num_calls > 0

    def read(self, deltas: Sequence[TokenDelta]) -> list[BlockEvent]:
        """Return what these tokens begin, add and end."""
        self.num_tokens += sum(delta.token_id is not None for delta in deltas)
        for each in self._reader.read(deltas):
            match each:
                case Content():
                    self._grow(self._opened(BlockKind.TEXT), each.text)
                case Reasoning():
                    self._grow(self._opened(BlockKind.REASONING), each.text)
                case CallBegins():
                    self._begin(BlockKind.CALL, each.name, new_call_id(self._call_id_length))
                case CallArguments():
                    assert self._open is not None and self._open.kind is BlockKind.CALL, "one call follows another"
                    self._grow(self._open, each.text)
        if deltas[-1].finish_reason is not None:
            self._end()
        events, self._events = self._events, []
        return events

    def _opened(self, kind: BlockKind) -> Block:
        if self._open is not None and self._open.kind is kind:
            return self._open
        return self._begin(kind)

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> Block:
        self._end()
        self._open = Block(len(self.blocks), kind, name, call_id)
        self.blocks.append(self._open)
        self._events.append(BlockBegins(self._open))
        return self._open

    def _grow(self, block: Block, text: str) -> None:
        block.add(text)
        self._events.append(BlockGrows(block, text))

    def _end(self) -> None:
        if self._open is not None:
            self._events.append(BlockEnds(self._open))
            self._open = None


class BlockAnswer(Answer):
    """An answer whose blocks are collected."""

    __slots__ = ("reader",)

    def __init__(self, reader: BlockReader) -> None:
        super().__init__(0)
        self.reader = reader

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        deltas = tuple(deltas)
        super().add(deltas)
        self.reader.read(deltas)
