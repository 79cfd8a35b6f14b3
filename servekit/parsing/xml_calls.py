"""Calls with XML inside, of Qwen3-Coder and of GLM. Their arguments become JSON as they arrive.

    <tool_call>                                <tool_call>NAME
    <function=NAME>                            <arg_key>KEY</arg_key>
    <parameter=KEY>                            <arg_value>VALUE</arg_value>
    VALUE                                      </tool_call>
    </parameter>
    </function>
    </tool_call>

A value stands there as plain text if it is a string, and as JSON otherwise. The function's schema tells which.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from servekit.parsing.answer_events import AnswerEvents
from servekit.parsing.parameter_types import ParameterTypes, as_json
from servekit.parsing.text_reader import Malformed, Steps, TextReader
from servekit.parsing.tool_calls import HermesCalls

_NAME = re.compile(r"[\w.-]*")


class _Members:
    """The arguments of one call: members of an object, which are passed on one after the other."""

    def __init__(self, answer: AnswerEvents, name: str) -> None:
        answer.begin_call(name)
        self._answer = answer
        self._types = ParameterTypes(answer.functions.get(name, ""))
        self._separator = "{"

    def read(self, reader: TextReader, key: str, ends: tuple[str, ...]) -> Steps[None]:
        """Read the value up to one of these ends, and pass the member on: a string in pieces, as it arrives."""
        types = self._types.of(key)
        begin, self._separator = f"{self._separator}{_as_string(key)}: ", ", "
        if types == {"string"}:
            self._answer.arguments(begin + '"')
            end = yield from reader.until(ends, lambda text: self._answer.arguments(_as_string(text)[1:-1]))
            if end is not None:
                self._answer.arguments('"')
            return
        self._answer.arguments(begin)
        pieces: list[str] = []
        if (yield from reader.until(ends, pieces.append)) is not None:
            self._answer.arguments(as_json("".join(pieces), types))

    def finish(self) -> None:
        """There are no more members."""
        self._answer.arguments("{}" if self._separator == "{" else "}")


@dataclass(frozen=True)
class QwenCoderCalls(HermesCalls):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` of Qwen3-Coder, which at times omits `<tool_call>`.

    Without that, only a function that the request has is called: the text may be about this form. And no grammar
    restricts such a call, because to it all before `<tool_call>` is text.
    """

    function: ClassVar[str] = "<function="
    parameter: ClassVar[str] = "<parameter="
    function_end: ClassVar[str] = "</function>"
    value_ends: ClassVar[tuple[str, ...]] = ("\n</parameter>", "</parameter>")  # a line break belongs to the form
    openings: ClassVar[tuple[str, ...]] = (HermesCalls.opening, function)

    def read_xml(self, reader: TextReader, answer: AnswerEvents, opening: str) -> Steps[None]:
        if opening != self.function:
            yield from reader.expect(self.function)
        name = yield from reader.word(_NAME)
        yield from reader.skip_whitespace()
        yield from reader.expect(">")
        is_bare = opening == self.function
        if not name or (is_bare and (name not in answer.functions or answer.has_strict_calls)):
            raise Malformed
        reader.accept()
        members = _Members(answer, name)
        while True:
            yield from reader.skip_whitespace()
            if (yield from reader.reads(self.function_end)) is not None:
                break
            reader.attempt()
            yield from reader.expect(self.parameter)
            key, _ = yield from reader.text_before(">")
            reader.accept()
            yield from reader.reads("\n")
            yield from members.read(reader, key.strip(), self.value_ends)
        members.finish()


@dataclass(frozen=True)
class GlmCalls(HermesCalls):
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` of GLM, with line breaks between them in GLM-4.5."""

    key: ClassVar[str] = "<arg_key>"
    key_end: ClassVar[str] = "</arg_key>"
    value: ClassVar[str] = "<arg_value>"
    value_end: ClassVar[str] = "</arg_value>"

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing, self.key, self.key_end, self.value, self.value_end

    def read_xml(self, reader: TextReader, answer: AnswerEvents, opening: str) -> Steps[None]:
        name = yield from reader.word(_NAME)
        yield from reader.skip_whitespace()
        found = yield from reader.reads(self.key, self.closing)
        if not name or found is None:
            raise Malformed
        reader.accept()
        members = _Members(answer, name)
        while found == self.key:
            reader.attempt()
            key, _ = yield from reader.text_before(self.key_end)
            yield from reader.skip_whitespace()
            yield from reader.expect(self.value)
            reader.accept()
            yield from members.read(reader, key.strip(), (self.value_end,))
            yield from reader.skip_whitespace()
            found = yield from reader.reads(self.key, self.closing)
        if found is None:
            raise Malformed
        members.finish()


def _as_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
