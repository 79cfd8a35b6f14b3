"""What was asked of a real service, and when: files of five formats, recognised by their first record.

    mooncake   JSON lines {"timestamp": ms, "input_length", "output_length", "hash_ids": [one for 512 tokens, …]}
               (Qin et al., "Mooncake", FAST 2025): no text, but which prompts begin alike
    burstgpt   CSV with Timestamp (s), Request tokens, Response tokens (Wang et al., "BurstGPT", 2024): no text
    sharegpt   {"conversations": [{"from", "value"}, …]}: no times; from what the model said only its length is taken
    jsonl      {"prompt", "max_tokens" or "output_length"?, "timestamp"?: s}
    batch      the lines of an OpenAI batch, {"body": {"prompt" or "messages", "max_tokens"?}}: no times

All but CSV are read as JSON lines and as one JSON list. Where a trace has lengths but no text, text of about that
length stands in. Nothing is left out but conversations in which nobody asks: a prompt too long for the server is for
the server to refuse. An answer of 0 tokens asks for 1, which is the least there is.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field
from numpy.random import Generator

from loadtest.errors import LoadTestError
from loadtest.lengths import MAX_TOKENS, Lengths
from loadtest.words import Words
from loadtest.workloads import Turn, Workload, endless_thinking_s

MOONCAKE_BLOCK_SIZE = 512  # tokens
MODELS = {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}  # `from` in ShareGPT; all else is said to a model

Length = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Entry(Struct, frozen=True):
    """One start of a trace."""

    turns: list[Turn]
    start_s: float | None = None  # from wherever the trace counts


class StandIn(Struct, frozen=True):
    """What takes the place of what a record does not say."""

    words: Words
    outputs: Iterator[int]
    thinking_s: Iterator[float]


class Record(Struct, frozen=True):
    """One record of a file. What its format has besides these fields is of no use here."""

    def entry(self, index: int, stand_in: StandIn) -> Entry:
        raise NotImplementedError


class Mooncake(Record, frozen=True):
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Length
    timestamp: float | None = None  # milliseconds
    hash_ids: list[Annotated[int, Meta(ge=0)]] = []

    def entry(self, index: int, stand_in: StandIn) -> Entry:
        # Even keys are shared blocks, odd ones what only this prompt has: where the ids end before it does.
        num_hashed = min(self.input_length, MOONCAKE_BLOCK_SIZE * len(self.hash_ids))
        prompt = stand_in.words.blocks([2 * each for each in self.hash_ids], MOONCAKE_BLOCK_SIZE, num_hashed)
        if num_hashed < self.input_length:
            prompt += stand_in.words.passage(2 * index + 1, self.input_length - num_hashed)
        group = self.hash_ids[0] if self.hash_ids else None
        turn = Turn(prompt, max(1, self.output_length), group=group)
        return Entry([turn], None if self.timestamp is None else self.timestamp / 1000)


class BurstGPT(Record, frozen=True):
    timestamp: float = field(name="Timestamp")
    num_prompt_tokens: Length = field(name="Request tokens")
    num_output_tokens: Length = field(name="Response tokens")

    def entry(self, index: int, stand_in: StandIn) -> Entry:
        prompt = stand_in.words.passage(index, self.num_prompt_tokens)
        return Entry([Turn(prompt, max(1, self.num_output_tokens))], self.timestamp)


class Said(Struct, frozen=True):
    value: str
    by: str = field(name="from")


class ShareGPT(Record, frozen=True):
    conversations: list[Said]

    def entry(self, index: int, stand_in: StandIn) -> Entry:
        turns: list[Turn] = []
        asked: list[str] = []
        for said in self.conversations:
            if said.by not in MODELS:
                asked.append(said.value)
            elif prompt := _joined(asked):
                turns.append(_turn(prompt, stand_in.words.num_tokens(said.value), bool(turns), stand_in))
                asked = []
        if prompt := _joined(asked):
            turns.append(_turn(prompt, next(stand_in.outputs), bool(turns), stand_in))
        return Entry(turns)


class Prompt(Record, frozen=True):
    prompt: Annotated[str, Meta(min_length=1)]
    max_tokens: Length | None = None
    output_length: Length | None = None  # another name for it
    timestamp: float | None = None  # seconds

    def entry(self, index: int, stand_in: StandIn) -> Entry:
        lengths = {each for each in (self.max_tokens, self.output_length) if each is not None}
        if len(lengths) > 1:
            raise LoadTestError(
                f"max_tokens is {self.max_tokens} and output_length {self.output_length}; keep one of them"
            )
        num_output_tokens = lengths.pop() if lengths else next(stand_in.outputs)
        return Entry([Turn(self.prompt, max(1, num_output_tokens))], self.timestamp)


class Message(Struct, frozen=True):
    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


class Body(Struct, frozen=True):
    prompt: str | None = None
    messages: list[Message] = []
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None


class BatchLine(Record, frozen=True):
    body: Body

    def entry(self, index: int, stand_in: StandIn) -> Entry:
        """Messages become one text, for that is what a request of a plan has."""
        body = self.body
        prompt = body.prompt or _joined([message.text() for message in body.messages])
        if not prompt:
            raise LoadTestError("body has neither a prompt nor messages with text")
        limits = [each for each in (body.max_completion_tokens, body.max_tokens) if each is not None]
        return Entry([Turn(prompt, max(1, limits[0] if limits else next(stand_in.outputs)))])


# Each with a field that no other has; but who gives prompts may also give their lengths, and means the prompts.
FORMATS: dict[str, tuple[type[Record], str]] = {
    "jsonl": (Prompt, "prompt"),
    "mooncake": (Mooncake, "input_length"),
    "burstgpt": (BurstGPT, "Request tokens"),
    "sharegpt": (ShareGPT, "conversations"),
    "batch": (BatchLine, "body"),
}


class Trace(Workload, frozen=True):
    """`trace:FILE`, and parameters: a workload that ends, and that may bring starts of its own."""

    file: str
    format: Literal["mooncake", "burstgpt", "sharegpt", "jsonl", "batch"] | None = None  # None: what the first is
    output: Lengths = Lengths("128")  # tokens of an answer, where the trace does not say
    turns: Annotated[int, Meta(ge=1)] | None = None  # of a conversation, at most; 1 makes single prompts of them
    think: Annotated[float, Meta(ge=0, le=86400)] = 0.0  # seconds, as in workloads.Conversation

    def conversations(self, words: Words, generator: Generator) -> Iterator[list[Turn]]:
        return (entry.turns for entry in self.entries(words, generator))

    def entries(self, words: Words, generator: Generator) -> Iterator[Entry]:
        """Reads the file as far as entries are taken. LoadTestError says where the first thing is that is wrong."""
        try:
            with open(self.file, encoding="utf-8-sig", newline="") as lines:
                yield from self.parse(lines, words, generator)
        except (OSError, UnicodeDecodeError) as error:
            raise LoadTestError(f"trace {self.file} cannot be read: {error}") from None

    def parse(self, lines: Iterable[str], words: Words, generator: Generator) -> Iterator[Entry]:
        """The same, of lines at hand."""
        for_outputs, for_thinking = generator.spawn(2)
        stand_in = StandIn(words, self.output.endless(for_outputs), endless_thinking_s(for_thinking, self.think))
        name: str | None = self.format
        place = "its beginning"
        is_empty = True
        try:
            records, decode = _opened(lines)
            for index, (place, record) in enumerate(records):  # noqa: B007 - an error tells the place
                content = decode(record)
                name = name or _recognised(content)
                entry = msgspec.convert(content, FORMATS[name][0], strict=name != "burstgpt").entry(index, stand_in)
                if entry.start_s is not None and not isfinite(entry.start_s):
                    raise LoadTestError(f"the time is {entry.start_s}")
                if entry.turns:
                    is_empty = False
                    yield Entry(entry.turns[: self.turns], entry.start_s)
            if is_empty:
                raise LoadTestError("nothing to ask is in this file; is it the right one?")
        except (msgspec.DecodeError, csv.Error, LoadTestError) as error:
            form = f" (read as {name})" if name else ""
            raise LoadTestError(f"trace {self.file}, {place}{form}: {error}") from None


def _opened(lines: Iterable[str]) -> tuple[Iterator[tuple[str, str | Raw]], Callable[[Any], Any]]:
    """Each record with its place, and what decodes it: JSON where the first character begins a list or an object."""
    numbered = ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
    place, first = next(numbered, ("", ""))
    if first.lstrip().startswith("["):
        items = msgspec.json.decode("".join([first, *(line for _, line in numbered)]), type=list[Raw])
        return ((f"entry {number}", item) for number, item in enumerate(items, 1)), msgspec.json.decode
    if first.lstrip().startswith("{"):
        return chain([(place, first)], numbered), msgspec.json.decode
    header = next(csv.reader([first]), [])
    return numbered, lambda line: dict(zip(header, next(csv.reader([line])), strict=False))


def _recognised(content: Any) -> str:
    fields = list(content) if isinstance(content, dict) else []
    for name, (_, field_of_its_own) in FORMATS.items():
        if field_of_its_own in fields:
            return name
    of_its_own = ", ".join(f"{name} by `{field_of_its_own}`" for name, (_, field_of_its_own) in FORMATS.items())
    raise LoadTestError(f"its fields ({', '.join(fields)}) are of no known format; known are {of_its_own}")


def _joined(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text.strip())


def _turn(prompt: str, num_output_tokens: int, is_later: bool, stand_in: StandIn) -> Turn:
    return Turn(prompt, num_output_tokens, next(stand_in.thinking_s) if is_later else 0.0)
