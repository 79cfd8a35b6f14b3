"""A reader reads the same text however it arrives, and keeps no more of it than an attempt may."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.parsing.text_reader import (
    MAX_ATTEMPT_CHARACTERS,
    Malformed,
    Steps,
    TextReader,
    first_match,
    live_prefix_length,
)
from tests.support.chat_answers import split

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def run(parse: Callable[[TextReader], Steps[Any]], pieces: list[str]) -> Any:
    """Return what a parser returns for a text in these pieces."""
    reader = TextReader()
    steps = parse(reader)
    try:
        next(steps)
        for piece in pieces:
            reader.add(piece)
            next(steps)
        reader.complete()
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for text that never comes")


@given(JSON_VALUES, st.booleans(), st.integers(0, 2**32))
def test_a_json_value_is_passed_on_as_it_is_written(value: Any, in_ascii: bool, seed: int) -> None:
    text = json.dumps(value, ensure_ascii=in_ascii)
    passed: list[str] = []

    def parse(reader: TextReader) -> Steps[str]:
        yield from reader.pass_value(passed.append)
        return (yield from reader.peek())

    assert run(parse, split(text + ",", seed)) == ","
    assert "".join(passed) == text


@given(st.text(), st.integers(0, 2**32))
def test_a_json_string_has_its_value(text: str, seed: int) -> None:
    def parse(reader: TextReader) -> Steps[str]:
        reader.attempt()
        return (yield from reader.string())

    for in_ascii in (True, False):
        assert run(parse, split(json.dumps(text, ensure_ascii=in_ascii), seed)) == text


@pytest.mark.parametrize("text", ["", '"', '"a', '"a\\', '"\\x"', '"\\ud800"', "a"])
def test_what_is_no_string_is_malformed(text: str) -> None:
    def parse(reader: TextReader) -> Steps[str]:
        reader.attempt()
        return (yield from reader.string())

    with pytest.raises(Malformed):
        run(parse, [text])


@pytest.mark.parametrize("text", ["", "{", '{"a', "]", ",", ":"])
def test_what_is_no_value_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        run(lambda reader: reader.skip_value(), [text])


def test_a_rejected_attempt_is_read_again() -> None:
    def parse(reader: TextReader) -> Steps[str]:
        reader.attempt()
        first = yield from reader.value()
        reader.reject()
        reader.reject()  # does nothing
        reader.attempt()
        again = yield from reader.value()
        reader.accept()
        found: list[str] = []
        yield from reader.until((), found.append)
        return f"{first} {again} {''.join(found)}"

    assert run(parse, ["[1, ", "2]", " rest"]) == "[1, 2] [1, 2]  rest"


def test_an_attempt_is_bounded() -> None:
    def parse(reader: TextReader) -> Steps[Any]:
        reader.attempt()
        return (yield from reader.text_before("never"))

    with pytest.raises(Malformed):
        run(parse, ["x" * 1000] * (MAX_ATTEMPT_CHARACTERS // 1000 + 2))
    with pytest.raises(Malformed):
        run(parse, ["x"])


def test_no_text_is_kept_outside_of_attempts() -> None:
    reader = TextReader()
    steps = reader.pass_value(lambda _: None)
    next(steps)
    for piece in ['{"a": "', *["x" * 1000] * 100]:
        reader.add(piece)
        next(steps)
    assert len(reader._text) <= 1000


def test_the_first_of_several_strings_ends_a_text() -> None:
    def parse(reader: TextReader) -> Steps[tuple[str, str]]:
        reader.attempt()
        return (yield from reader.text_before("[ARGS]", "{"))

    for seed in range(20):
        assert run(parse, split("name[ARGS]{", seed)) == ("name", "[ARGS]")
    assert run(parse, ["name", "{"]) == ("name", "{")


def test_the_end_of_a_text_decides_what_was_held_back() -> None:
    found: list[str] = []
    assert run(lambda reader: reader.until(("<think>",), found.append), ["a <thi", "", "nk"]) is None
    assert found == ["a ", "<think"]
    assert run(lambda reader: reader.reads("<think>", "x"), ["<thi"]) is None


def test_matches_are_those_of_text_that_arrives_by_characters() -> None:
    strings = ("abc", "b", "cab")
    rng = random.Random(5)
    for _ in range(500):
        text = "".join(rng.choices("abc", k=rng.randrange(8)))
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(strings)]
        found = first_match(text, strings)
        assert (found is None) == (not ends)
        if found is not None:
            assert found[0] + len(found[1]) == ends[0]
        held = live_prefix_length(text, strings)
        proper = [string[:end] for string in strings for end in range(1, len(string)) if text.endswith(string[:end])]
        assert held == max(map(len, proper), default=0)
    assert live_prefix_length("abc", ()) == 0


def test_a_number_may_be_the_end_of_a_text() -> None:
    def parse(reader: TextReader) -> Steps[str]:
        reader.attempt()
        return (yield from reader.value())

    assert run(parse, ["1", "2", ".5"]) == "12.5"
