"""Tests of the memory of outcomes: bytes, shares of tenants, and expiry."""

from __future__ import annotations

from servekit.sandbox.jobs import Done, Refused
from servekit.sandbox.outcome_cache import ENTRY_BYTES, OutcomeCache

FOREVER = float("inf")


def test_an_outcome_is_found_until_it_expires() -> None:
    cache = OutcomeCache(2**20)
    cache.put("t", b"a", Done("compiled"), FOREVER)
    cache.put("t", b"b", Refused("too slow"), 10.0)
    assert cache.get("t", b"a", 1e9) == Done("compiled")
    assert cache.get("t", b"b", 9.9) == Refused("too slow")
    assert cache.get("t", b"b", 10.0) is None and cache.get("t", b"c", 0.0) is None
    assert cache.num_bytes == ENTRY_BYTES + 4 * len("compiled")


def test_tenants_share_no_outcome() -> None:
    cache = OutcomeCache(2**20)
    cache.put("a", b"x", Refused("too slow"), FOREVER)
    assert cache.get("b", b"x", 0.0) is None
    cache.put("b", b"x", Done("compiled"), 10.0)
    assert cache.get("a", b"x", 0.0) == Refused("too slow") and cache.get("b", b"x", 0.0) == Done("compiled")
    assert cache.get("b", b"x", 10.0) is None and cache.get("a", b"x", 10.0) == Refused("too slow")


def test_a_flooding_tenant_replaces_only_its_own_outcomes() -> None:
    cache = OutcomeCache(100 * (ENTRY_BYTES + 400))
    for number in range(10):
        cache.put("modest", b"modest %d" % number, Done("x" * 100), FOREVER)
    for number in range(1000):
        cache.put("flood", b"flood %d" % number, Done("x" * 100), FOREVER)
        assert cache.num_bytes <= 100 * (ENTRY_BYTES + 400)
    assert all(cache.get("modest", b"modest %d" % number, 0.0) for number in range(10))
    assert cache.get("flood", b"flood 999", 0.0) and not cache.get("flood", b"flood 0", 0.0)


def test_the_least_recently_used_outcome_goes_first() -> None:
    cache = OutcomeCache(3 * (ENTRY_BYTES + 4))
    for name in (b"a", b"b", b"c"):
        cache.put("t", name, Done("x"), FOREVER)
    assert cache.get("t", b"a", 0.0)
    cache.put("t", b"d", Done("x"), FOREVER)
    assert cache.get("t", b"a", 0.0) and not cache.get("t", b"b", 0.0)


def test_an_outcome_that_is_put_again_is_counted_once() -> None:
    cache = OutcomeCache(2**20)
    for _ in range(3):
        cache.put("t", b"a", Done("xy"), FOREVER)
    assert cache.num_bytes == ENTRY_BYTES + 8


def test_an_outcome_larger_than_the_cache_is_not_kept_and_removes_nothing() -> None:
    cache = OutcomeCache(2 * ENTRY_BYTES)
    cache.put("t", b"a", Done("x"), FOREVER)
    cache.put("t", b"b", Done("x" * ENTRY_BYTES), FOREVER)
    assert cache.get("t", b"a", 0.0) and not cache.get("t", b"b", 0.0)
