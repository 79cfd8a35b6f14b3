"""The demands on the server under an attack, and the figures that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

from msgspec import Struct

from tests.torture.report import Finding


class Claim(Struct, frozen=True):
    """A demand and the figure. `is_kept` is None for a figure without a demand.

    `is_timed` claims depend on how fast the machine is and on what else it does, so tests leave them out.
    """

    demanded: str
    measured: str
    is_kept: bool | None = None
    is_timed: bool = False


class Scenario(Struct, frozen=True):
    """An attack with its own sequence. `run(seconds, chance)` takes about twice `seconds`, and returns the claims."""

    name: str
    run: Callable[[float, Random], list[Claim]]


def finding(name: str, claims: Iterable[Claim]) -> Finding:
    """Return one line of the report for all claims of an attack."""
    claims = list(claims)
    measured = [("missed: " if claim.is_kept is False else "") + claim.measured for claim in claims]
    return Finding(
        name,
        "; ".join(claim.demanded for claim in claims if claim.demanded),
        "; ".join(measured),
        all(claim.is_kept is not False for claim in claims),
    )


def counts(counter: Mapping[str, int]) -> str:
    """Return `200: 1,204, 503: 3`, the most frequent first."""
    ordered = sorted(counter.items(), key=lambda item: -item[1])
    return ", ".join(f"{name}: {count:,}" for name, count in ordered) or "none"
