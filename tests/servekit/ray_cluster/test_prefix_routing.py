"""Which replica a prompt goes to."""

from __future__ import annotations

import json

import pytest

from servekit.ray_cluster.prefix_routing import BYTES_PER_REQUEST, prompt_of, rank
from servekit.ray_cluster.prefix_table import PrefixTable

SYSTEM = b"You are a helpful assistant. " * 15
CONVERSATION = SYSTEM + b"x" * 3 * BYTES_PER_REQUEST


@pytest.fixture
def table() -> PrefixTable:
    table = PrefixTable()
    table.add(CONVERSATION, "one")
    return table


def test_a_conversation_goes_where_it_was(table: PrefixTable) -> None:
    assert rank(table, CONVERSATION + b" and on", {"one": 2, "two": 0, "three": 0}) == [["one"], ["two", "three"]]


def test_a_replica_with_much_more_to_do_is_not_preferred(table: PrefixTable) -> None:
    assert rank(table, CONVERSATION, {"one": 4, "two": 0, "three": 0}) == [["two", "three"], ["one"]]


def test_a_short_beginning_that_all_share_does_not_send_all_to_one_replica(table: PrefixTable) -> None:
    table.add(SYSTEM, "one")
    assert rank(table, SYSTEM + b"y" * 500, {"one": 1, "two": 0}) == [["two"], ["one"]]
    assert rank(table, SYSTEM + b"y" * 500, {"one": 0, "two": 0}) == [["one"], ["two"]]


def test_an_unknown_prompt_goes_to_the_replica_with_the_least_to_do(table: PrefixTable) -> None:
    assert rank(table, b"z" * 500, {"one": 1, "two": 0, "three": 1}) == [["two"], ["one", "three"]]
    assert rank(table, b"", {"one": 0, "two": 0}) == [["one", "two"]]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"temperature": 0, "prompt": "Hello"}, b'"Hello"'),
        ({"messages": [{"role": "user"}], "model": "m"}, b'"m"[{"role": "user"}]'),
        ({"messages": [], "system": "S"}, b'"S"[]'),
        ({"input": "I", "instructions": "N"}, b'"N""I"'),
        ({"inputs": "T"}, b'"T"'),
        ({"other": 1}, b""),
        ([1], b""),
    ],
)
def test_what_the_prompt_is_made_of_is_found_in_the_body_of_each_api(body: object, prompt: bytes) -> None:
    assert prompt_of(json.dumps(body).encode()) == prompt


def test_a_body_that_is_no_json_has_no_prompt() -> None:
    assert prompt_of(b"") == prompt_of(b"\xff{") == prompt_of(b"[" * 10_000) == b""
