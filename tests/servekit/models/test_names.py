"""Names of models, and aliases that divide requests."""

from __future__ import annotations

from collections import Counter

from servekit.models.names import Names, Split

KEYS = [b"key %d" % number for number in range(20_000)]


def test_alias_gives_each_model_its_share_of_keys_and_each_key_always_the_same() -> None:
    split = Split({"a": 90.0, "b": 10.0})
    counts = Counter(map(split.choose, KEYS))
    assert 0.09 < counts["b"] / len(KEYS) < 0.11
    assert [Split({"b": 10.0, "a": 90.0}).choose(key) for key in KEYS] == [split.choose(key) for key in KEYS]


def test_change_of_weights_moves_only_the_keys_that_it_must() -> None:
    before, after = Split({"a": 90.0, "b": 10.0}), Split({"a": 80.0, "b": 20.0})
    moved = Counter((before.choose(key), after.choose(key)) for key in KEYS)
    assert moved["b", "a"] == 0, "none goes back"
    assert 0.08 < moved["a", "b"] / len(KEYS) < 0.12


def test_model_of_weight_0_gets_nothing() -> None:
    assert set(map(Split({"a": 0.0, "b": 1.0}).choose, KEYS)) == {"b"}


def test_names_are_ids_aliases_and_those_that_are_divided() -> None:
    split = Split({"a": 1.0, "b": 1.0})
    names = Names(["a", "b"], {"other": "b"}, {"canary": split})
    assert list(names) == ["a", "b", "other", "canary"]
    assert names.find("a") == "a" and names.find("other") == "b"
    assert names.find("canary") is None and names.split("canary") is split and names.split("a") is None
    assert names.ids_of("canary") == ("a", "b") and names.ids_of("other") == ("b",) and names.ids_of("no") == ()
