"""Write grammars in llguidance's dialect of Lark, in which `<[7]>` is the token with id 7, whatever its text is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from servekit.request import Grammar

TokenId = Callable[[str], int | None]  # the id of an added token by its text; None if there is none


class Lark:
    """The parts of one grammar, and how to write a model's tokens in it."""

    def __init__(self, token_id: TokenId, eos_token_ids: Sequence[int]) -> None:
        self._token_id = token_id
        self._eos_token_ids = eos_token_ids
        self.parts: list[Grammar] = []
        self.rules: list[str] = []  # beside `start`

    def part(self, grammar: Grammar) -> str:
        """Add a grammar of another kind, and return the symbol for it."""
        self.parts.append(grammar)
        return f"@part{len(self.parts) - 1}"

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


@dataclass(frozen=True)
class Calls:
    """What matches the tool calls at the end of an answer that may also have none."""

    trigger: str = ""  # the marker that begins them; "" if they have no grammar
    symbol: str = ""

    def free_text(self, lark: Lark, not_first: str = "") -> str:
        """Return what matches any text that does not begin with the marker `not_first`, and the calls behind it."""
        text = f"{lark.any_but(self.trigger)}*"
        if not_first:
            text = f"({lark.any_but(self.trigger, not_first)} {text})?"
        return f"{text} ({self.symbol})?" if self.symbol else text
