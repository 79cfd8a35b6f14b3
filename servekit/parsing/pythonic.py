"""Read calls that are written as Python: `[name(key=value, …), …]`. Their arguments become JSON as they arrive."""

from __future__ import annotations

import json
import re

from servekit.parsing.answer_events import AnswerEvents
from servekit.parsing.text_reader import Malformed, Steps, TextReader

_NAME = re.compile(r"[\w.-]*")
_WORD = re.compile(r"[\w.+-]*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_BRACKETS = {"(": "[", ")": "]"}  # tuples are lists


def read_pythonic_calls(reader: TextReader, answer: AnswerEvents) -> Steps[None]:
    """Read a list of calls. Begins in an attempt, and accepts it when the first call is certain. Raises Malformed.

    A call of a function that the request does not have is not a call.
    """
    yield from reader.expect("[")
    while True:
        yield from reader.skip_whitespace()
        name = yield from reader.word(_NAME)
        yield from reader.expect("(")
        if name not in answer.functions:
            raise Malformed
        reader.accept()
        answer.begin_call(name)
        yield from _read_arguments(reader, answer)
        yield from reader.skip_whitespace()
        if (yield from reader.reads(",")) is None:
            break
        reader.attempt()
    yield from reader.expect("]")


def _read_arguments(reader: TextReader, answer: AnswerEvents) -> Steps[None]:
    """Read keyword arguments up to the closing parenthesis, and pass them on as members of an object."""
    separator = "{"
    while True:
        yield from reader.skip_whitespace()
        if (yield from reader.reads(")")) is not None:
            break
        reader.attempt()
        key = yield from reader.word(_NAME)
        yield from reader.skip_whitespace()
        yield from reader.expect("=")
        reader.accept()
        answer.arguments(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from _read_value(reader, answer)
        yield from reader.skip_whitespace()
        yield from reader.reads(",")
    answer.arguments("{}" if separator == "{" else "}")


def _read_value(reader: TextReader, answer: AnswerEvents) -> Steps[None]:
    """Read a literal of Python, token by token, and pass it on as JSON."""
    depth = 0
    while True:
        yield from reader.skip_whitespace()
        character = yield from reader.peek()
        reader.attempt()
        if character in ("'", '"'):
            answer.arguments(_string((yield from reader.raw_string(character))))
        elif (word := (yield from reader.word(_WORD))) != "":
            answer.arguments(_WORDS.get(word) or _number(word))
        else:
            character = yield from reader.take()
            if character not in "()[]{},:":
                raise Malformed
            depth += (character in "([{") - (character in ")]}")
            if depth < 0:
                raise Malformed
            text = _BRACKETS.get(character, character)
            answer.arguments(text + " " if character in ",:" else text)
        reader.accept()
        if depth == 0:
            return


def _string(token: str) -> str:
    """Return a string of Python as JSON. Raises Malformed."""
    try:
        text = _ESCAPE.sub(_unescaped, token[1:-1])
    except (ValueError, OverflowError):  # no such character
        raise Malformed from None
    is_valid = text.encode("utf-8", "replace").decode() == text
    return json.dumps(text, ensure_ascii=not is_valid)  # a surrogate stays escaped, because UTF-8 has none


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPES.get(escape, escape if escape in "\\'\"" else match[0])


def _number(token: str) -> str:
    """Return a number of Python as JSON. Raises Malformed."""
    for kind in (lambda text: int(text, 0), float):
        try:
            return json.dumps(kind(token), allow_nan=False)
        except ValueError:
            continue
    raise Malformed
