"""Traces: recorded prompts or lengths and times of a real service. Five formats, recognised by the first record.

    mooncake   JSON lines {"timestamp": ms, "input_length", "output_length", "hash_ids": [one for 512 tokens, …]}
               (Qin et al., "Mooncake", FAST 2025): no text, but which prompts share a prefix
    burstgpt   CSV with Timestamp (s), Request tokens, Response tokens (Wang et al., "BurstGPT", 2024): no text
    sharegpt   {"conversations": [{"from", "value"}, …]}: no times; of the model's text only the length is used
    jsonl      {"prompt", "max_tokens" or "output_length"?, "timestamp"?: s}
    batch      the lines of an OpenAI batch, {"body": {"prompt" or "messages", "max_tokens"?}}: no times

All except CSV are read as JSON lines or as one JSON list. If a trace has lengths but no text, text of about that length
is generated. Only conversations without any prompt are left out; a prompt that is too long for the server is sent, and
the server refuses it. An answer of 0 tokens becomes one of 1, the smallest possible.
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
from loadtest.planning.lengths import MAX_TOKENS, Lengths
from loadtest.planning.text import TextGenerator
from loadtest.planning.workloads import Turn, Workload, endless_thinking_s

MOONCAKE_BLOCK_SIZE = 512  # tokens
MODELS = {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}  # `from` in ShareGPT; all else is said to a model

Length = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Entry(Struct, frozen=True):
    """One start of a trace."""

    turns: list[Turn]
    start_s: float | None = None  # on the clock of the trace


class Substitutes(Struct, frozen=True):
    """What replaces the fields that a record lacks."""

    words: TextGenerator
    outputs: Iterator[int]
    thinking_s: Iterator[float]


class Record(Struct, frozen=True):
    """One record of a file. Other fields of its format are ignored."""

    def entry(self, index: int, substitutes: Substitutes) -> Entry:
        raise NotImplementedError


class Mooncake(Record, frozen=True):
    """See the module."""

    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Length
    timestamp: float | None = None  # milliseconds
    hash_ids: list[Annotated[int, Meta(ge=0)]] = []

    def entry(self, index: int, substitutes: Substitutes) -> Entry:
        # Even keys are shared blocks. Odd keys are text of this prompt alone, after its last hash id.
        num_hashed = min(self.input_length, MOONCAKE_BLOCK_SIZE * len(self.hash_ids))
        prompt = substitutes.words.blocks([2 * each for each in self.hash_ids], MOONCAKE_BLOCK_SIZE, num_hashed)
        if num_hashed < self.input_length:
            prompt += substitutes.words.passage(2 * index + 1, self.input_length - num_hashed)
        group = self.hash_ids[0] if self.hash_ids else None
        turn = Turn(prompt, max(1, self.output_length), group=group)
        return Entry([turn], None if self.timestamp is None else self.timestamp / 1000)


class BurstGPT(Record, frozen=True):
    """See the module."""

    timestamp: float = field(name="Timestamp")
    num_prompt_tokens: Length = field(name="Request tokens")
    num_output_tokens: Length = field(name="Response tokens")

    def entry(self, index: int, substitutes: Substitutes) -> Entry:
        prompt = substitutes.words.passage(index, self.num_prompt_tokens)
        return Entry([Turn(prompt, max(1, self.num_output_tokens))], self.timestamp)


class Said(Struct, frozen=True):
    value: str
    by: str = field(name="from")


class ShareGPT(Record, frozen=True):
    """See the module."""

    conversations: list[Said]

    def entry(self, index: int, substitutes: Substitutes) -> Entry:
        turns: list[Turn] = []
        asked: list[str] = []
        for said in self.conversations:
            if said.by not in MODELS:
                asked.append(said.value)
            elif prompt := _joined(asked):
                turns.append(_turn(prompt, substitutes.words.num_tokens(said.value), bool(turns), substitutes))
                asked = []
        if prompt := _joined(asked):
            turns.append(_turn(prompt, next(substitutes.outputs), bool(turns), substitutes))
        return Entry(turns)


class Prompt(Record, frozen=True):
    """A record of the format jsonl."""

    prompt: Annotated[str, Meta(min_length=1)]
    max_tokens: Length | None = None
    output_length: Length | None = None  # another name for max_tokens
    timestamp: float | None = None  # seconds

    def entry(self, index: int, substitutes: Substitutes) -> Entry:
        lengths = {each for each in (self.max_tokens, self.output_length) if each is not None}
        if len(lengths) > 1:
            raise LoadTestError(
                f"max_tokens is {self.max_tokens} but output_length is {self.output_length}; keep one of them"
            )
        num_output_tokens = lengths.pop() if lengths else next(substitutes.outputs)
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

    def entry(self, index: int, substitutes: Substitutes) -> Entry:
        """Join the messages into one text, as a request of a plan has one."""
        body = self.body
        prompt = body.prompt or _joined([message.text() for message in body.messages])
        if not prompt:
            raise LoadTestError("body has neither a prompt nor messages with text")
        limits = [each for each in (body.max_completion_tokens, body.max_tokens) if each is not None]
        return Entry([Turn(prompt, max(1, limits[0] if limits else next(substitutes.outputs)))])


# Each with a field that no other format has. A record with prompts may have lengths as well: prompts win.
FORMATS: dict[str, tuple[type[Record], str]] = {
    "jsonl": (Prompt, "prompt"),
    "mooncake": (Mooncake, "input_length"),
    "burstgpt": (BurstGPT, "Request tokens"),
    "sharegpt": (ShareGPT, "conversations"),
    "batch": (BatchLine, "body"),
}


class Trace(Workload, frozen=True):
    """`trace:FILE` with parameters: a workload that ends, and that may have start times of its own."""

    file: str
    format: Literal["mooncake", "burstgpt", "sharegpt", "jsonl", "batch"] | None = (
        None  # None: recognised by the first record
    )
    output: Lengths = Lengths("128")  # tokens of an answer, if the trace has none
    turns: Annotated[int, Meta(ge=1)] | None = None  # at most, of a conversation; 1 makes single prompts of them
    think: Annotated[float, Meta(ge=0, le=86400)] = 0.0  # seconds, as in workloads.Conversation

    def conversations(self, words: TextGenerator, generator: Generator) -> Iterator[list[Turn]]:
        return (entry.turns for entry in self.entries(words, generator))

    def entries(self, words: TextGenerator, generator: Generator) -> Iterator[Entry]:
        """Read the file as far as entries are taken. LoadTestError names the place of the first error."""
        try:
            with open(self.file, encoding="utf-8-sig", newline="") as lines:
                yield from self.parse(lines, words, generator)
        except (OSError, UnicodeDecodeError) as error:
            raise LoadTestError(f"trace {self.file} cannot be read: {error}") from None

    def parse(self, lines: Iterable[str], words: TextGenerator, generator: Generator) -> Iterator[Entry]:
        """Parse lines."""
        for_outputs, for_thinking = generator.spawn(2)
        substitutes = Substitutes(words, self.output.endless(for_outputs), endless_thinking_s(for_thinking, self.think))
        name: str | None = self.format
        place = "its beginning"
        is_empty = True
        try:
            records, decode = _opened(lines)
            for index, (place, record) in enumerate(records):  # noqa: B007 - an error tells the place
                content = decode(record)
                name = name or _recognised(content)
                entry = msgspec.convert(content, FORMATS[name][0], strict=name != "burstgpt").entry(index, substitutes)
                if entry.start_s is not None and not isfinite(entry.start_s):
                    raise LoadTestError(f"the timestamp is {entry.start_s}, not a finite number")
                if entry.turns:
                    is_empty = False
                    yield Entry(entry.turns[: self.turns], entry.start_s)
            if is_empty:
                raise LoadTestError("the file has no prompts; check that it is the right one")
        except (msgspec.DecodeError, csv.Error, LoadTestError) as error:
            form = f" (read as {name})" if name else ""
            raise LoadTestError(f"trace {self.file}, {place}{form}: {error}") from None


def _opened(lines: Iterable[str]) -> tuple[Iterator[tuple[str, str | Raw]], Callable[[Any], Any]]:
    """Return each record with its place, and its decoder: JSON if the first character begins a list or an object."""
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
    raise LoadTestError(f"its fields ({', '.join(fields)}) match no known format; known are {of_its_own}")


def _joined(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text.strip())


def _turn(prompt: str, num_output_tokens: int, is_later: bool, substitutes: Substitutes) -> Turn:
    return Turn(prompt, num_output_tokens, next(substitutes.thinking_s) if is_later else 0.0)
