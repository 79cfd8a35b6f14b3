"""Read tool calls in the formats of several families of models. Text that is not a valid call stays content.

From the name of the function on, a call is passed on while it arrives, so no later text can turn it back into content.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from servekit.parsing.answer_events import AnswerEvents
from servekit.parsing.lark import Lark, literal, one_of, one_or_more, regular_expression, text_before
from servekit.parsing.pythonic import read_pythonic_calls
from servekit.parsing.text_reader import Malformed, Steps, TextReader

# Of one answer with a grammar that demands calls: without a bound, a small model calls until max_tokens.
MAX_DEMANDED_CALLS = 16
EMPTY = "{}"


@dataclass(frozen=True)
class FunctionSymbol:
    """A function, and the symbol in a grammar that matches its arguments."""

    name: str
    arguments: str


class ToolFormat(Protocol):
    """How a family of models writes its calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must stay in the answer's text, because the parser needs them."""

    @property
    def call_id_length(self) -> int | None:
        """The length of the ids that the model's template accepts; None if it accepts any."""

    @property
    def can_be_strict(self) -> bool:
        """Whether a grammar can tell optional calls from text, and so hold their arguments to a schema."""

    def read(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        """Read the answer after the reasoning: content and calls."""

    def calls(self, functions: Sequence[FunctionSymbol], lark: Lark, most: int) -> str:
        """Return what matches 1 to `most` calls of these functions."""

    def free_text(self, functions: Sequence[FunctionSymbol], most: int, lark: Lark, not_first: str = "") -> str:
        """Return what matches text, and up to `most` calls of these functions after it, which match their grammars.

        It does not begin with the marker `not_first`. Only for a format that can be strict.
        """


# -- reading -----------------------------------------------------------------------------------------------------------


def read_call_object(reader: TextReader, answer: AnswerEvents, known: Container[str] | None = None) -> Steps[None]:
    """Read a call that is a JSON object with `name`, and `arguments` or `parameters`, in any order.

    Begins in an attempt, and accepts it when the call is certain. Raises Malformed. `known`: the names of functions, if
    an object with another name is not a call.
    """
    name, arguments = None, None
    yield from reader.expect("{")
    while True:
        yield from reader.skip_whitespace()
        key = yield from reader.string()
        yield from reader.skip_whitespace()
        yield from reader.expect(":")
        yield from reader.skip_whitespace()
        if key == "name":
            name = yield from reader.string()
            if not name or (known is not None and name not in known):
                raise Malformed
        elif key in ("arguments", "parameters"):
            if name is not None and (yield from reader.peek()) == "{":
                reader.accept()
                answer.begin_call(name)
                yield from reader.pass_value(answer.arguments)
                yield from _skip_members(reader)
                return
            arguments = yield from _arguments(reader)
        else:
            yield from reader.skip_value()
        yield from reader.skip_whitespace()
        if (yield from reader.reads(",")) is None:
            break
    yield from reader.expect("}")
    if name is None:
        raise Malformed
    reader.accept()
    answer.begin_call(name)
    answer.arguments(arguments or EMPTY)


def _arguments(reader: TextReader) -> Steps[str]:
    """Read arguments that do not follow the name, or are no object: some models write a string with JSON, or null."""
    if (yield from reader.peek()) == '"':
        text: str = yield from reader.string()
        return text
    text = yield from reader.value()
    return EMPTY if text == "null" else text


def _skip_members(reader: TextReader) -> Steps[None]:
    """Read what follows the arguments in their object. Raises Malformed."""
    while True:
        yield from reader.skip_whitespace()
        if (yield from reader.reads(",")) is None:
            break
        yield from reader.skip_whitespace()
        yield from reader.skip_value()
        yield from reader.skip_whitespace()
        yield from reader.expect(":")
        yield from reader.skip_whitespace()
        yield from reader.skip_value()
    yield from reader.expect("}")


def _call_object(function: FunctionSymbol, key: str = "arguments", has_type: bool = False) -> str:
    head = '{"type": "function", ' if has_type else "{"
    head += f'"name": {json.dumps(function.name)}, "{key}": '
    return f"{literal(head)} {function.arguments} {literal('}')}"


# -- formats -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HermesCalls:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` of Hermes and Qwen.

    Other families write XML in the place of the object: classes in xml_calls.py read both, because a grammar cannot
    hold XML to a JSON schema. So where a grammar demands calls, these models write the object, too.
    """

    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"
    openings: ClassVar[tuple[str, ...]] = (opening,)  # what a call may begin with
    call_id_length: int | None = None
    can_be_strict: ClassVar[bool] = True

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def read(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        while (opening := (yield from reader.until(self.openings, answer.text))) is not None:
            reader.attempt()
            num_calls = answer.num_calls
            try:
                yield from reader.skip_whitespace()
                if opening == self.opening and (yield from reader.peek()) == "{":
                    yield from read_call_object(reader, answer)
                else:
                    yield from self.read_xml(reader, answer, opening)
                yield from reader.skip_whitespace()
                yield from reader.reads(self.closing)
                answer.begin_content()
            except Malformed:
                reader.reject()
                if answer.num_calls == num_calls:
                    answer.text(opening)

    def read_xml(self, reader: TextReader, answer: AnswerEvents, opening: str) -> Steps[None]:
        """Read a call that is no JSON object, after the text that it begins with. Raises Malformed."""
        yield from ()
        raise Malformed

    def calls(self, functions: Sequence[FunctionSymbol], lark: Lark, most: int) -> str:
        call = one_of([_call_object(function) for function in functions])
        between = literal("\n")
        call = f"({lark.marker(self.opening)} {between} {call} {between} {lark.marker(self.closing)})"
        return one_or_more(call, "\n", most)

    def free_text(self, functions: Sequence[FunctionSymbol], most: int, lark: Lark, not_first: str = "") -> str:
        return text_before(self.calls(functions, lark, most), self.opening, lark, not_first)


@dataclass(frozen=True)
class LlamaCalls:
    """`{"name": …, "parameters": …}` at the start of an answer, of Llama 3, with semicolons between calls.

    An object with another name than that of a function is content: the user may have asked for JSON. `is_pythonic`:
    Llama 3.2 and 4 write `[name(key=value, …), …]`. That form is read, too. No grammar holds Python's literals to a
    JSON schema, so where a grammar demands calls, these models write the form with JSON.
    """

    is_pythonic: bool = False
    python_tag: ClassVar[str] = "<|python_tag|>"
    call_id_length: int | None = None

    @property
    def can_be_strict(self) -> bool:
        return not self.is_pythonic

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.python_tag,)

    def read(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        while True:
            reader.attempt()
            try:
                yield from reader.skip_whitespace()
                if answer.num_calls:
                    yield from reader.reads(";", ",")
                    yield from reader.skip_whitespace()
                yield from reader.reads(self.python_tag)
                yield from reader.skip_whitespace()
                if self.is_pythonic and (yield from reader.peek()) == "[":
                    yield from read_pythonic_calls(reader, answer)
                else:
                    yield from read_call_object(reader, answer, answer.functions)
            except Malformed:
                reader.reject()
                break
        yield from reader.until((), answer.text)

    def calls(self, functions: Sequence[FunctionSymbol], lark: Lark, most: int) -> str:
        call = one_of([_call_object(function, "parameters") for function in functions])
        return one_or_more(call, "; ", most)

    def free_text(self, functions: Sequence[FunctionSymbol], most: int, lark: Lark, not_first: str = "") -> str:
        # An object with the name of a function is a call wherever the name stands in it, so text must be none.
        names = "|".join(regular_expression(function.name) for function in functions)
        lark.add_rule("NO_CALL", rf'/(?s:.*)/ & ~/\s*\{{(?s:.*)"name"\s*:\s*"({names})"(?s:.*)/')
        tag = f"{lark.marker(self.python_tag)}? " if lark.has_token(self.python_tag) else ""
        calls = [_call_object(each, "parameters", has_type) for each in functions for has_type in (False, True)]
        return f"(NO_CALL | {tag}{one_or_more(one_of(calls), '; ', most)})"


@dataclass(frozen=True)
class MistralCalls:
    """`[TOOL_CALLS]` and a list of objects, of Mistral's first models; `[TOOL_CALLS]name[ARGS]{…}` of later ones."""

    trigger: ClassVar[str] = "[TOOL_CALLS]"
    arguments: ClassVar[str] = "[ARGS]"
    call_id: ClassVar[str] = "[CALL_ID]"
    call_id_length: int | None = 9
    can_be_strict: ClassVar[bool] = True

    @property
    def markers(self) -> tuple[str, ...]:
        return self.trigger, self.arguments, self.call_id

    def read(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        while (yield from reader.until((self.trigger,), answer.text)) is not None:
            reader.attempt()
            num_calls = answer.num_calls
            try:
                yield from reader.skip_whitespace()
                if (yield from reader.reads("[")) is not None:
                    yield from self._read_list(reader, answer)
                else:
                    yield from self._read_call(reader, answer)
                answer.begin_content()
            except Malformed:
                reader.reject()
                if answer.num_calls == num_calls:
                    answer.text(self.trigger)

    def _read_list(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        while True:
            yield from reader.skip_whitespace()
            yield from read_call_object(reader, answer)
            yield from reader.skip_whitespace()
            if (yield from reader.reads(",")) is None:
                break
            reader.attempt()
        yield from reader.expect("]")

    def _read_call(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        name, marker = yield from reader.text_before(self.arguments, self.call_id, "{")
        if marker == self.call_id:
            _, marker = yield from reader.text_before(self.arguments)
        if not name.strip():
            raise Malformed
        if marker == "{":
            reader.back(1)
        else:
            yield from reader.skip_whitespace()
        reader.accept()
        answer.begin_call(name.strip())
        yield from reader.pass_value(answer.arguments)

    def calls(self, functions: Sequence[FunctionSymbol], lark: Lark, most: int) -> str:
        trigger = lark.marker(self.trigger)
        if lark.has_token(self.arguments):
            arguments = lark.marker(self.arguments)
            names = [f"{literal(each.name)} {arguments} {each.arguments}" for each in functions]
            return one_or_more(f"({trigger} {one_of(names)})", "", most)
        call = one_of([_call_object(function) for function in functions])
        return f"{trigger} {literal('[')} {one_or_more(call, ', ', most)} {literal(']')}"

    def free_text(self, functions: Sequence[FunctionSymbol], most: int, lark: Lark, not_first: str = "") -> str:
        return text_before(self.calls(functions, lark, most), self.trigger, lark, not_first)


@dataclass(frozen=True)
class DeepSeekCalls:
    """Calls between DeepSeek's markers. `has_fences`: V3 and R1 write the arguments in a block of Markdown."""

    has_fences: bool = True
    trigger: ClassVar[str] = "<｜tool▁calls▁begin｜>"
    call_begin: ClassVar[str] = "<｜tool▁call▁begin｜>"
    separator: ClassVar[str] = "<｜tool▁sep｜>"
    call_end: ClassVar[str] = "<｜tool▁call▁end｜>"
    end: ClassVar[str] = "<｜tool▁calls▁end｜>"
    fence: ClassVar[str] = "```"
    call_id_length: int | None = None
    can_be_strict: ClassVar[bool] = True

    @property
    def markers(self) -> tuple[str, ...]:
        return self.trigger, self.call_begin, self.separator, self.call_end, self.end

    def read(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        while (yield from reader.until((self.trigger,), answer.text)) is not None:
            reader.attempt()
            num_calls = answer.num_calls
            try:
                yield from self._read_calls(reader, answer)
                answer.begin_content()
            except Malformed:
                reader.reject()
                if answer.num_calls == num_calls:
                    answer.text(self.trigger)

    def _read_calls(self, reader: TextReader, answer: AnswerEvents) -> Steps[None]:
        while True:
            yield from reader.skip_whitespace()
            yield from reader.expect(self.call_begin)
            name, _ = yield from reader.text_before(self.separator)
            if self.has_fences:  # what stood there was the kind of the tool, always "function"
                name, _ = yield from reader.text_before(f"{self.fence}json")
            yield from reader.skip_whitespace()
            if not name.strip():
                raise Malformed
            reader.accept()
            answer.begin_call(name.strip())
            yield from reader.pass_value(answer.arguments)
            yield from reader.skip_whitespace()
            yield from reader.reads(self.fence)
            yield from reader.skip_whitespace()
            yield from reader.expect(self.call_end)
            yield from reader.skip_whitespace()
            if (yield from reader.reads(self.end)) is not None:
                return
            reader.attempt()

    def calls(self, functions: Sequence[FunctionSymbol], lark: Lark, most: int) -> str:
        begin, separator, end = map(lark.marker, (self.call_begin, self.separator, self.call_end))
        if self.has_fences:
            kinds = [
                f"{literal('function')} {separator} {literal(f'{each.name}{chr(10)}{self.fence}json{chr(10)}')} "
                f"{each.arguments} {literal(chr(10) + self.fence)}"
                for each in functions
            ]
        else:
            kinds = [f"{literal(each.name)} {separator} {each.arguments}" for each in functions]
        call = f"({begin} {one_of(kinds)} {end})"
        several = one_or_more(call, "\n" if self.has_fences else "", most)
        return f"{lark.marker(self.trigger)} {several} {lark.marker(self.end)}"

    def free_text(self, functions: Sequence[FunctionSymbol], most: int, lark: Lark, not_first: str = "") -> str:
        return text_before(self.calls(functions, lark, most), self.trigger, lark, not_first)
