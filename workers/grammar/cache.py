"""Keep compiled grammars for each tenant, with the bytes that they take, in the order of their last use."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from llguidance import LLMatcher


@dataclass(eq=False, slots=True)
class CompiledGrammar:
    """A tenant's grammar, and what was compiled from it and can be compiled again."""

    tenant: str
    text: str
    root: LLMatcher | None = None  # a matcher before the first token, of which copies are made
    num_bytes: int = 0  # of `root` and of its copies
    num_masks: int = 0  # computed since it was compiled
    mask_s: float = 0.0  # recent time of a mask
    matchers: dict[int, LLMatcher] = field(default_factory=dict)  # by sequence
    num_sequences: int = 0  # sequences that may ask for masks


@dataclass(eq=False, slots=True)
class _Tenant:
    """The grammars of one tenant, by their texts."""

    grammars: dict[str, CompiledGrammar] = field(default_factory=dict)
    compiled: OrderedDict[str, CompiledGrammar] = field(default_factory=OrderedDict)  # most recently used last
    num_bytes: int = 0  # of all of them


class GrammarCache:
    """The grammars that sequences follow, or that are compiled.

    Each operation takes constant time, except `least_recent`, which looks at each tenant once.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def acquire(self, tenant: str, text: str) -> CompiledGrammar:
        """Return the tenant's grammar, and count one more sequence that uses it."""
        grammars = self._tenants.setdefault(tenant, _Tenant()).grammars
        grammar = grammars.get(text)
        if grammar is None:
            grammar = grammars[text] = CompiledGrammar(tenant, text)
        grammar.num_sequences += 1
        return grammar

    def release(self, grammar: CompiledGrammar) -> None:
        """Count one sequence less that uses the grammar. A compiled grammar stays in the cache."""
        grammar.num_sequences -= 1
        self._forget_if_unused(grammar)

    def use(self, grammar: CompiledGrammar, root: LLMatcher) -> None:
        """Note that a compiled grammar is the one that its tenant used last."""
        grammar.root = root
        compiled = self._tenants[grammar.tenant].compiled
        compiled[grammar.text] = grammar
        compiled.move_to_end(grammar.text)

    def add_bytes(self, grammar: CompiledGrammar, num_bytes: int) -> None:
        """Count bytes, which may be negative, for a grammar and for its tenant."""
        grammar.num_bytes += num_bytes
        self._tenants[grammar.tenant].num_bytes += num_bytes

    def drop(self, grammar: CompiledGrammar) -> None:
        """Free the compiled grammar and its matchers, which can be made again."""
        self.add_bytes(grammar, -grammar.num_bytes)
        self._tenants[grammar.tenant].compiled.pop(grammar.text, None)
        grammar.root = None
        grammar.matchers.clear()
        grammar.num_masks = 0
        self._forget_if_unused(grammar)

    def least_recent(self, kept: CompiledGrammar) -> CompiledGrammar | None:
        """Return the least recently used grammar of the tenant whose grammars take most bytes, but never `kept`."""
        oldest = [
            (tenant.num_bytes, grammar)
            for tenant in self._tenants.values()
            for grammar in [next((each for each in tenant.compiled.values() if each is not kept), None)]
            if grammar is not None
        ]
        return max(oldest, key=lambda each: each[0])[1] if oldest else None

    def of_tenant(self, tenant: str) -> list[CompiledGrammar]:
        """Return the tenant's grammars."""
        return list(self._tenants[tenant].grammars.values()) if tenant in self._tenants else []

    def _forget_if_unused(self, grammar: CompiledGrammar) -> None:
        tenant = self._tenants[grammar.tenant]
        if grammar.root is None and not grammar.num_sequences:
            del tenant.grammars[grammar.text]
            if not tenant.grammars:
                del self._tenants[grammar.tenant]
