"""Claims about which compiled grammar is dropped, and about what is counted. Roots are any objects here."""

from __future__ import annotations

from typing import Any

from workers.grammar.cache import CompiledGrammar, GrammarCache

ROOT: Any = object()


def compiled(cache: GrammarCache, tenant: str, text: str, num_bytes: int) -> CompiledGrammar:
    grammar = cache.acquire(tenant, text)
    cache.use(grammar, ROOT)
    cache.add_bytes(grammar, num_bytes)
    return grammar


def test_the_tenant_that_holds_most_loses_what_it_used_least_recently() -> None:
    cache = GrammarCache()
    small = compiled(cache, "modest", "a", 150)
    first, second, third = (compiled(cache, "greedy", text, 100) for text in "abc")
    cache.use(first, ROOT)
    dropped = []
    while (grammar := cache.least_recent(kept=third)) is not None:
        dropped.append(grammar)
        cache.drop(grammar)
    assert dropped == [second, first, small], "the tenant that holds most is another one after two drops"
    assert third.root is ROOT and not any(each.root for each in dropped)


def test_one_of_many_grammars_is_found_without_visiting_the_others() -> None:
    class Unseen(CompiledGrammar):
        """Fails when its bytes are read."""

        num_bytes = property(lambda self: 1 / 0, lambda self, value: None)  # type: ignore[assignment]

    cache = GrammarCache()
    oldest = compiled(cache, "a", "oldest", 1)
    for number in range(1000):
        grammar = Unseen("a", str(number))
        cache._tenants["a"].grammars[grammar.text] = grammar
        cache.use(grammar, ROOT)
    assert cache.least_recent(kept=compiled(cache, "b", "", 1)) is oldest


def test_bytes_are_counted_for_tenants_and_nothing_is_left_of_what_is_not_used() -> None:
    cache = GrammarCache()
    grammar, same, other = (compiled(cache, "a", text, 50) for text in "xxy")
    assert grammar is same and cache._tenants["a"].num_bytes == 150
    cache.release(other)
    assert other in cache.of_tenant("a"), "it is compiled, and the next request may need it"
    cache.drop(other)
    cache.drop(grammar)
    assert cache.of_tenant("a") == [grammar] and cache._tenants["a"].num_bytes == 0
    cache.release(grammar)
    cache.release(grammar)
    assert not cache._tenants and not cache.of_tenant("a")
