"""Which replica has had the beginning of a prompt."""

from __future__ import annotations

from servekit.ray_cluster.prefix_table import CHUNK_BYTES, MAX_CHUNKS, PrefixTable

A, B, C, X = (letter * CHUNK_BYTES for letter in (b"a", b"b", b"c", b"x"))


def test_each_replica_knows_the_longest_beginning_that_it_has_had() -> None:
    table = PrefixTable()
    table.add(A + A + A, "one")
    table.add(A + B + B, "two")
    assert table.known_bytes(A + B + B + b" and another turn", ["one", "two", "three"]) == {
        "one": CHUNK_BYTES,
        "two": 3 * CHUNK_BYTES,
        "three": 0,
    }
    assert table.known_bytes(X, ["one", "two"]) == {"one": 0, "two": 0}


def test_a_beginning_shorter_than_a_chunk_is_not_known() -> None:
    table = PrefixTable()
    table.add(A[1:], "one")
    assert table.known_bytes(A[1:], ["one"]) == {"one": 0}


def test_equal_chunks_behind_other_beginnings_are_not_equal() -> None:
    table = PrefixTable()
    table.add(A + X, "one")
    assert table.known_bytes(B + X, ["one"]) == {"one": 0}


def test_of_a_very_long_prompt_only_the_beginning_is_remembered() -> None:
    table = PrefixTable()
    table.add(A * (MAX_CHUNKS + 10), "one")
    assert table.known_bytes(A * (MAX_CHUNKS + 10), ["one"]) == {"one": MAX_CHUNKS * CHUNK_BYTES}


def test_what_was_used_least_recently_is_forgotten() -> None:
    table = PrefixTable(max_entries=4)
    for prompt in (A + A, B + B, A + A, C + C):
        table.add(prompt, "one")
    assert table.known_bytes(A + A, ["one"]) == {"one": 2 * CHUNK_BYTES}
    assert table.known_bytes(B + B, ["one"]) == {"one": 0}
