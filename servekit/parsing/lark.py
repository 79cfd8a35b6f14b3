"""Write grammars in llguidance's dialect of Lark, in which `<[7]>` is the token with id 7, whatever its text is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from servekit.requests.generation import Grammar

TokenId = Callable[[str], int | None]  # the id of an added token by its text; None if there is none


class Lark:
    """The parts of one grammar, and how to write a model's tokens in it."""

    def __init__(self, token_id: TokenId, eos_token_ids: Sequence[int]) -> None:
        self._token_id = token_id
        self._eos_token_ids = eos_token_ids
        self.parts: list[Grammar] = []
        self.rules: list[str] = []  # besides `start`

    def part(self, grammar: Grammar) -> str:
        """Add a grammar of another kind, and return the symbol for it."""
        self.parts.append(grammar)
        return f"@part{len(self.parts) - 1}"

    def add_rule(self, name: str, body: str) -> None:
        """Add a rule, unless it was added before. A terminal has a name in capital letters."""
        if (rule := f"{name}: {body}") not in self.rules:
            self.rules.append(rule)

    def has_token(self, text: str) -> bool:
        """Whether this text is one token."""
        return self._token_id(text) is not None

    def marker(self, text: str) -> str:
        """Return the symbol for a marker: a token, or its text where the model has no such token."""
        token_id = self._token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def any_but(self, *markers: str) -> str:
        """Return the symbol for any token but these markers; only those that are tokens can be left out."""
        found = sorted(token_id for text in markers if (token_id := self._token_id(text)) is not None)
        return f"<[^{','.join(map(str, found))}]>" if found else "<[*]>"

    def running_text(self, end: str, max_tokens: int | None) -> str:
        """Return the symbol for tokens that neither are the marker `end` nor end the answer, at most so many."""
        token_id = self._token_id(end)
        assert token_id is not None
        symbol = f"<[^{','.join(map(str, sorted({token_id, *self._eos_token_ids})))}]>"
        if max_tokens is None:
            return symbol + "*"
        return f"{symbol}{{0,{max_tokens}}}" if max_tokens else ""


def literal(text: str) -> str:
    """Return the symbol for a text. A JSON string in ASCII is a Lark literal."""
    return json.dumps(text)


def one_of(symbols: Sequence[str]) -> str:
    """Return the symbol for any of these."""
    return f"({' | '.join(symbols)})"


def one_or_more(symbol: str, separator: str, most: int) -> str:
    """Return the symbol for 1 to `most` of these, with the separator between them; "" is no separator."""
    if most == 1:
        return symbol
    return f"{symbol} ({f'{literal(separator)} ' if separator else ''}{symbol}){{0,{most - 1}}}"


def regular_expression(text: str) -> str:
    """Return a regular expression that matches this text, to stand between slashes."""
    return re.escape(text).replace("/", r"\/")


class FreeText(Protocol):
    """Text that a grammar does not restrict. It may have calls at its end that are restricted."""

    def __call__(self, lark: Lark, not_first: str = "") -> str:
        """Return what matches it. It does not begin with the marker `not_first`."""


def any_text(lark: Lark, not_first: str = "") -> str:
    """Return what matches any text that does not begin with the marker `not_first`."""
    return f"({lark.any_but(not_first)} <[*]>*)?" if not_first else "<[*]>*"


def text_before(calls: str, trigger: str, lark: Lark, not_first: str = "") -> str:
    """Return what matches any text, and these calls after it. The first of them begins with the marker `trigger`."""
    if lark.has_token(trigger):
        text = f"{lark.any_but(trigger)}*"
        if not_first:
            text = f"({lark.any_but(trigger, not_first)} {text})?"
        return f"{text} ({calls})?"
    # The trigger is text. The lazy lexeme ends where it is complete, so that no other text can contain it. None of both
    # lexemes matches special tokens, so neither begins with `not_first`.
    before, found, behind = calls.partition(literal(trigger))
    assert found
    lark.add_rule("before_calls[lazy]", f"/(?s:.*){regular_expression(trigger)}/")
    return f"({before} before_calls {behind} | /(?s:.*)/)"
