"""Read text that is still arriving.

A parser is a generator. It reads with the methods of a `TextReader`, and it yields where it needs text that has not
arrived yet. So its code is written as if the whole text were there, nothing is read twice, and what it finds does not
depend on the pieces in which the text arrives.

Text that was read is forgotten. Only during an attempt it is kept, so that it can be read again as something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

Value = TypeVar("Value")
Steps = Generator[None, None, Value]  # a parser that returns a Value

MAX_ATTEMPT_CHARACTERS = 2**16  # kept for one attempt; a longer one fails
_PLAIN = re.compile(r'[^\s"{}\[\],:]+')  # of JSON: numbers and words
_SPACE = re.compile(r"\s+")
_INSIDE = re.compile(r'[^"{}\[\]]*')  # of JSON: what neither begins nor ends a string, an object or a list


class Malformed(Exception):
    """The text is not what the parser expects here."""


def first_match(text: str, strings: tuple[str, ...]) -> tuple[int, str] | None:
    """Return (start, string) of the match that ends first, as if the text had arrived character by character."""
    matches = [(start + len(string), start, string) for string in strings if (start := text.find(string)) >= 0]
    if not matches:
        return None
    _, start, string = min(matches)
    return start, string


def live_prefix_length(text: str, strings: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of the strings."""
    first_characters = {string[:1] for string in strings}
    for length in range(min(len(text), max(map(len, strings), default=1) - 1), 0, -1):
        if text[-length] in first_characters:  # of most text none is
            suffix = text[-length:]
            if any(string.startswith(suffix) and len(string) > length for string in strings):
                return length
    return 0


class TextReader:
    """The text of one answer, and the position that a parser has reached in it."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_complete = False
        self._is_attempt = False
        self._pass_on: Callable[[str], None] | None = None

    def add(self, text: str) -> None:
        """Append the text that has arrived."""
        self._text += text

    def complete(self) -> None:
        """No more text arrives."""
        self._is_complete = True

    @property
    def is_complete(self) -> bool:
        """Whether no more text arrives. A parser that fails before that met a text that it does not know."""
        return self._is_complete

    # -- attempts ------------------------------------------------------------------------------------------------------

    def attempt(self) -> None:
        """Keep what is read from here on, until `accept` or `reject`."""
        self._flush()
        self._is_attempt = True

    def accept(self) -> None:
        """Forget what the attempt has read."""
        self._is_attempt = False
        self._flush()

    def reject(self) -> None:
        """Go back to where the attempt began. If it was accepted, this does nothing."""
        if self._is_attempt:
            self._is_attempt, self._position = False, 0

    # -- text ----------------------------------------------------------------------------------------------------------

    def until(self, strings: tuple[str, ...], pass_on: Callable[[str], None]) -> Steps[str | None]:
        """Pass on the text before the first of these strings, in pieces, and read the string.

        Returns the string; None at the end of the text.
        """
        self._flush()
        while True:
            found = first_match(self._text, strings)
            if found is not None:
                start, string = found
                self._release(start, pass_on)
                self._text = self._text[len(string) :]
                return string
            num_held = 0 if self._is_complete else live_prefix_length(self._text, strings)
            self._release(len(self._text) - num_held, pass_on)
            if not (yield from self._wait()):
                return None

    def _release(self, length: int, pass_on: Callable[[str], None]) -> None:
        if length:
            pass_on(self._text[:length])
            self._text = self._text[length:]

    def text_before(self, *strings: str) -> Steps[tuple[str, str]]:
        """Read the text before the first of these strings, and the string. Returns both. Only in an attempt.

        Raises Malformed at the end of the text.
        """
        start = searched = self._position
        longest = max(map(len, strings))
        while True:
            found = first_match(self._text[searched:], strings)
            if found is not None:
                end, string = searched + found[0], found[1]
                self._position = end + len(string)
                return self._text[start:end], string
            searched = max(start, len(self._text) - longest)
            self._position = len(self._text)
            if not (yield from self._wait()):
                raise Malformed

    def reads(self, *strings: str) -> Steps[str | None]:
        """Read the one of these strings that comes next. Returns None, and reads nothing, if none of them does."""
        longest = max(map(len, strings))
        while True:
            rest = self._text[self._position : self._position + longest]
            for string in strings:
                if rest.startswith(string):
                    self._position += len(string)
                    return string
            if not any(string.startswith(rest) for string in strings) or not (yield from self._wait()):
                return None

    def expect(self, string: str) -> Steps[None]:
        """Read this string. Raises Malformed if it does not come next."""
        if (yield from self.reads(string)) is None:
            raise Malformed

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end of the text."""
        while self._position == len(self._text):
            if not (yield from self._wait()):
                return ""
        return self._text[self._position]

    def take(self) -> Steps[str]:
        """Read the next character. Raises Malformed at the end of the text."""
        character = yield from self.peek()
        if not character:
            raise Malformed
        self._position += 1
        return character

    def back(self, num_characters: int) -> None:
        """Go back over the last characters. Only in an attempt."""
        self._position -= num_characters

    def skip_whitespace(self) -> Steps[None]:
        """Read all whitespace that comes next."""
        while (yield from self.peek()).isspace():
            found = _SPACE.match(self._text, self._position)
            assert found is not None
            self._position = found.end()

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the characters that match the pattern, which matches any number of them. Only in an attempt."""
        start = self._position
        while (yield from self.peek()):
            found = pattern.match(self._text, self._position)
            if found is None or found.end() == self._position:
                break
            self._position = found.end()
        return self._text[start : self._position]

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def string(self) -> Steps[str]:
        """Read a JSON string, and return its value. Only in an attempt. Raises Malformed."""
        text = yield from self.raw_string()
        try:
            value: str = json.loads(text, strict=False)
            value.encode()  # fails for half of a surrogate pair, which UTF-8 does not have
        except ValueError:
            raise Malformed from None
        return value

    def raw_string(self, quote: str = '"') -> Steps[str]:
        """Read a string, and return it as it is written, with its quotes. Only in an attempt. Raises Malformed."""
        start = self._position
        yield from self.expect(quote)
        yield from self._skip_string(quote)
        return self._text[start : self._position]

    def value(self) -> Steps[str]:
        """Read a JSON value, and return it as it is written. Only in an attempt. Raises Malformed."""
        start = self._position
        yield from self.skip_value()
        return self._text[start : self._position]

    def pass_value(self, pass_on: Callable[[str], None]) -> Steps[None]:
        """Read a JSON value, and pass it on in pieces, as it is written. Raises Malformed where it is none."""
        self._flush()
        self._pass_on = pass_on
        try:
            yield from self.skip_value()
        finally:
            self._flush()
            self._pass_on = None

    def skip_value(self) -> Steps[None]:
        """Read a JSON value. Brackets must match in number only. Raises Malformed."""
        depth = 0
        while True:
            character = yield from self.take()
            if character == '"':
                yield from self._skip_string(character)
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            elif depth == 0:
                self._position -= 1
                yield from self._skip_plain()
            else:
                found = _INSIDE.match(self._text, self._position)
                assert found is not None
                self._position = found.end()
            if depth < 0:
                raise Malformed
            if depth == 0:
                return

    def _skip_plain(self) -> Steps[None]:
        """Read a number or a word. Raises Malformed if there is none."""
        num_found = 0
        while (yield from self.peek()):
            found = _PLAIN.match(self._text, self._position)
            if found is None:
                break
            num_found += 1
            self._position = found.end()
        if not num_found:
            raise Malformed

    def _skip_string(self, quote: str) -> Steps[None]:
        """Read a string up to its end, after the quote that begins it. Raises Malformed at the end of the text."""
        while (character := (yield from self.take())) != quote:
            if character == "\\":
                yield from self.take()
            else:
                self._skip_to(quote)

    def _skip_to(self, quote: str) -> None:
        """Go on to the next quote or backslash of a string, or to the end of the text that is there."""
        ends = [found for each in (quote, "\\") if (found := self._text.find(each, self._position)) >= 0]
        self._position = min(ends, default=len(self._text))

    # -- the text that is there ----------------------------------------------------------------------------------------

    def _wait(self) -> Steps[bool]:
        """Wait for more text. Returns False if there is no more. Raises Malformed for an attempt that is too long."""
        if self._is_complete:
            return False
        if not self._is_attempt:
            self._flush()
        elif self._position > MAX_ATTEMPT_CHARACTERS:
            raise Malformed
        yield
        return True

    def _flush(self) -> None:
        """Forget the text that was read; pass it on, if it is part of a value that is passed on."""
        if self._position:
            if self._pass_on is not None:
                self._pass_on(self._text[: self._position])
            self._text, self._position = self._text[self._position :], 0
