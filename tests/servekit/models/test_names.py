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


def test_so_many_percent_of_the_requests_are_copied_and_the_choice_of_a_model_says_nothing_about_it() -> None:
    split = Split({"a": 1.0, "b": 1.0}, mirror="new", mirror_percent=10.0)
    requests = [f"r{number}" for number in range(4000)]
    copied = [request for request in requests if split.is_mirrored(request)]
    assert 0.08 < len(copied) / len(requests) < 0.12
    assert 0.4 < sum(split.choose(request.encode()) == "a" for request in copied) / len(copied) < 0.6
    assert split.ids == ("a", "b", "new") and Names(["a"], {}, {"both": split}).ids_of("both") == ("a", "b")
    whole, none = (Split({"a": 1.0}, mirror="new", mirror_percent=percent) for percent in (100.0, 0.0))
    assert all(map(whole.is_mirrored, requests)) and not any(map(none.is_mirrored, requests))
    assert not any(map(Split({"a": 1.0}).is_mirrored, requests[:5]))
