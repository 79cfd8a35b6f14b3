"""Calls that are written as Python have the arguments that Python would pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chat_answers import answer_format, events_of, message, parse, split

PYTHONIC = answer_format("none", "pythonic")
LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "long_name"]), LITERALS), st.integers(0, 2**32))
def test_arguments_are_what_python_evaluates(arguments: dict[str, Any], seed: int) -> None:
    text = f"[add({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    ((name, found),) = message(events_of(PYTHONIC, split(text, seed)))["calls"]
    assert (name, json.loads(found)) == ("add", arguments)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("(1, 'x')", [1, "x"]),
        ('"it\'s \\"so\\" \\\\ \\n"', 'it\'s "so" \\ \n'),
        ("'\\x41\\u00e9\\U0001F600\\d'", "Aé😀\\d"),
        ("'\\ud800'", "\ud800"),
        ("0x1F", 31),
        ("1_000", 1000),
        ("-2.5e3", -2500.0),
        ("{'a': {'b': [None]}}", {"a": {"b": [None]}}),
    ],
)
def test_forms_of_literals(written: str, value: Any) -> None:
    ((_, found),) = parse(PYTHONIC, f"[ add ( a = {written} ) ]".replace("add (", "add("))["calls"]
    assert json.loads(found) == {"a": value}
    found.encode()


@pytest.mark.parametrize("text", ["[1, 2]", "[other(a=1)]", "[add]", "[add", "["])
def test_another_list_is_content(text: str) -> None:
    assert parse(PYTHONIC, text) == {"content": text}


@pytest.mark.parametrize("value", ["x", "inf", "1e999", "'\\UFFFFFFFF'", "'open", "=", "9j", ""])
def test_a_call_with_something_else_has_begun(value: str) -> None:
    assert parse(PYTHONIC, f"[add(a={value})]")["calls"][0] == ("add", '{"a": ')
