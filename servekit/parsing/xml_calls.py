"""Read calls with XML inside, of Qwen3-Coder and of GLM. Their arguments become JSON as they arrive.

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
from collections.abc import Iterator
from contextlib import contextmanager
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

    def read(self, reader: TextReader, key: str, ends: tuple[str, ...]) -> Steps[str | None]:
        """Read the value up to one of these ends, and pass the member on: a string in pieces, as it arrives.

        Returns the end that was read; None if the answer ended before it.
        """
        types = self._types.of(key)
        begin, self._separator = f"{self._separator}{_as_string(key)}: ", ", "
        if types == {"string"}:
            self._answer.arguments(begin + '"')
            end = yield from reader.until(ends, lambda text: self._answer.arguments(_as_string(text)[1:-1]))
            if end is not None:
                self._answer.arguments('"')
            return end
        self._answer.arguments(begin)
        pieces: list[str] = []
        end = yield from reader.until(ends, pieces.append)
        if end is not None:
            self._answer.arguments(as_json("".join(pieces), types))
        return end

    def finish(self) -> None:
        """There are no more members."""
        self._answer.arguments("{}" if self._separator == "{" else "}")


@contextmanager
def _members_of_call(reader: TextReader, answer: AnswerEvents, name: str) -> Iterator[_Members]:
    """Begin a call whose members are read inside, and finish its object.

    If something unknown follows a member, the object is finished, too: clients get JSON, and what follows is content.
    It stays open if the answer ends inside the call, so that a call that was cut does not look like a whole one.
    """
    members = _Members(answer, name)
    try:
        yield members
    except Malformed:
        if not reader.is_complete:
            members.finish()
        raise
    members.finish()


@dataclass(frozen=True)
class QwenCoderCalls(HermesCalls):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` of Qwen3-Coder, which at times omits `<tool_call>`.

    Without that, only a function that the request has is called: the text may be about this form. And no grammar
    restricts such a call, because to it all before `<tool_call>` is text.
    """

    function: ClassVar[str] = "<function="
    parameter: ClassVar[str] = "<parameter="
    function_end: ClassVar[str] = "</function>"
    parameter_end: ClassVar[str] = "</parameter>"
    # A line break belongs to the form. Models at times omit the end of a parameter.
    value_ends: ClassVar[tuple[str, ...]] = (
        "\n" + parameter_end,
        parameter_end,
        "\n" + parameter,
        "\n" + function_end,
    )
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
        with _members_of_call(reader, answer, name) as members:
            found = yield from self._read_marker(reader)
            while found == self.parameter:
                key: list[str] = []
                yield from reader.until((">",), key.append)
                yield from reader.reads("\n")
                end = yield from members.read(reader, "".join(key).strip(), self.value_ends)
                if end is None:
                    raise Malformed
                found = end.strip()
                if found == self.parameter_end:
                    found = yield from self._read_marker(reader)

    def _read_marker(self, reader: TextReader) -> Steps[str]:
        """Read what begins a parameter, or ends the call. Raises Malformed if something else comes next."""
        yield from reader.skip_whitespace()
        found = yield from reader.reads(self.parameter, self.function_end, self.closing)
        if found is None:
            raise Malformed
        return found


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
        with _members_of_call(reader, answer, name) as members:
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


def _as_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
