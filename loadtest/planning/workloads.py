"""Generated workloads: what is sent. Each has a name and parameters.

    queries:output=64                      short questions, as typed into a search engine
    random:input=512,output=128            random words; no two prompts begin alike
    prefix:groups=20,prefix=256,suffix=32,output=64,zipf=1
                                           prompts of a group share a prefix; group popularity is Zipf distributed
    conversation:turns=4,input=64,output=64,think=2
                                           each turn follows the one before, after `think` seconds on average
    documents:document=4096,output=128     a long text, then a question about it

Every parameter has the default shown above. Numbers of tokens and of turns take the forms of planning/lengths.py:
`random:input=lognormal:512,0.8|16-4096,output=uniform:16-256`. A parameter ends at a comma that is followed by the next
`name=`; a length never contains `=`, so a comma inside a length does not end it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from numpy.random import Generator

from loadtest.errors import LoadTestError
from loadtest.planning.lengths import BLOCK, Lengths
from loadtest.planning.text import TextGenerator, queries, zipf_ranks


class Turn(Struct, frozen=True, gc=False):
    """One request before it has a position in a plan."""

    prompt: str
    max_tokens: int
    think_s: float = 0.0  # from the end of the turn before
    group: int | None = None


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """A workload, whose fields are its parameters.

    Each parameter draws from its own generator, so that changing one does not change the others.
    """

    def conversations(self, words: TextGenerator, generator: Generator) -> Iterator[list[Turn]]:
        """Yield the turns of one start after the other, without end. Only conversations have several turns."""
        raise NotImplementedError


class Queries(Workload, frozen=True):
    """Short questions."""

    output: Lengths = Lengths("64")

    def conversations(self, words: TextGenerator, generator: Generator) -> Iterator[list[Turn]]:
        for_queries, for_outputs = generator.spawn(2)
        for query, output in zip(queries(for_queries), self.output.endless(for_outputs), strict=True):
            yield [Turn(query, output)]


class Random(Workload, frozen=True):
    """Random words."""

    input: Lengths = Lengths("512")
    output: Lengths = Lengths("128")

    def conversations(self, words: TextGenerator, generator: Generator) -> Iterator[list[Turn]]:
        for_inputs, for_outputs = generator.spawn(2)
        lengths = zip(self.input.endless(for_inputs), self.output.endless(for_outputs), strict=True)
        for key, (num_input_tokens, output) in enumerate(lengths):
            yield [Turn(words.passage(key, num_input_tokens), output)]


class SharedPrefix(Workload, frozen=True):
    """Groups of prompts with the same prefix."""

    groups: Annotated[int, Meta(ge=1, le=1_000_000)] = 20
    prefix: Lengths = Lengths("256")  # drawn once for each group
    suffix: Lengths = Lengths("32")
    output: Lengths = Lengths("64")
    zipf: Annotated[float, Meta(ge=0, le=10)] = 1.0  # 0: all groups are equally popular

    def conversations(self, words: TextGenerator, generator: Generator) -> Iterator[list[Turn]]:
        for_groups, for_prefixes, for_suffixes, for_outputs = generator.spawn(4)
        prefix_lengths = self.prefix.draw(for_prefixes, self.groups).tolist()
        prefixes = [words.beginning(group, length) for group, length in enumerate(prefix_lengths)]
        parts = zip(
            self._endless_groups(for_groups),
            self.suffix.endless(for_suffixes),
            self.output.endless(for_outputs),
            strict=True,
        )
        for key, (group, num_suffix_tokens, output) in enumerate(parts, start=self.groups):
            yield [Turn(prefixes[group] + words.passage(key, num_suffix_tokens), output, group=group)]

    def _endless_groups(self, generator: Generator) -> Iterator[int]:
        while True:
            yield from zipf_ranks(generator, self.groups, self.zipf, BLOCK).tolist()


class Conversation(Workload, frozen=True):
    """Several turns, each after the answer to the one before."""

    turns: Lengths = Lengths("4")
    input: Lengths = Lengths("64")  # of each turn; the conversation so far is added
    output: Lengths = Lengths("64")
    think: Annotated[float, Meta(ge=0, le=86400)] = 2.0  # seconds; mean of an exponential distribution

    def conversations(self, words: TextGenerator, generator: Generator) -> Iterator[list[Turn]]:
        for_turns, for_inputs, for_outputs, for_thinking = generator.spawn(4)
        inputs, outputs = self.input.endless(for_inputs), self.output.endless(for_outputs)
        thinking_s = endless_thinking_s(for_thinking, self.think)
        key = 0
        for num_turns in self.turns.endless(for_turns):
            turns = []
            for place in range(num_turns):
                think_s = next(thinking_s) if place else 0.0
                turns.append(Turn(words.passage(key, next(inputs)), next(outputs), think_s))
                key += 1
            yield turns


class Documents(Workload, frozen=True):
    """A long text, then a question about it."""

    document: Lengths = Lengths("4096")
    output: Lengths = Lengths("128")

    def conversations(self, words: TextGenerator, generator: Generator) -> Iterator[list[Turn]]:
        for_documents, for_outputs = generator.spawn(2)
        lengths = zip(self.document.endless(for_documents), self.output.endless(for_outputs), strict=True)
        for key, (num_document_tokens, output) in enumerate(lengths):
            document = words.passage(key, num_document_tokens)
            about = " and ".join(document.split(maxsplit=2)[:2])
            yield [Turn(f"{document}\n\nWhat does the text above say about {about}?", output)]


WORKLOADS: dict[str, type[Workload]] = {
    "queries": Queries,
    "random": Random,
    "prefix": SharedPrefix,
    "conversation": Conversation,
    "documents": Documents,
}


def parse_workload(text: str, kinds: Mapping[str, type[Workload]] = WORKLOADS) -> Workload:
    """Raises LoadTestError for a name that is not in `kinds`, and for unknown parameters.

    If the kind has a parameter `file`, the first value may be given without its name.
    """
    name, _, parameters = text.partition(":")
    kind = kinds.get(name)
    if kind is None:
        raise LoadTestError(f"--workload {name} is unknown; use {', '.join(kinds)}")
    takes = ", ".join(kind.__struct_fields__)
    values: dict[str, str] = {}
    for parameter in re.split(r",(?=[a-z_]+=)", parameters) if parameters else []:
        key, has_value, value = parameter.partition("=")
        if not has_value and not values and "file" in kind.__struct_fields__:
            key, value = "file", parameter
        elif not has_value or key in values:
            reason = "is given twice" if has_value else "is not of the form name=value"
            raise LoadTestError(f"--workload {text}: `{key}` {reason}; {name} takes {takes}")
        values[key] = value
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=_decode_parameter)
    except (msgspec.ValidationError, LoadTestError) as error:
        raise LoadTestError(f"--workload {text}: {error}; {name} takes {takes}") from None


def endless_thinking_s(generator: Generator, mean_s: float) -> Iterator[float]:
    """Yield pauses between an answer and the next turn, exponentially distributed."""
    while True:
        yield from (mean_s * generator.standard_exponential(BLOCK)).tolist()


def _decode_parameter(kind: type, value: Any) -> Any:
    assert kind is Lengths and isinstance(value, str)
    return Lengths(value)
