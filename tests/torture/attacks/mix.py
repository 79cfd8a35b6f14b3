"""Everything at once: strikes of all attacks on one model, in an order and at moments that come from the seed."""

from __future__ import annotations

import asyncio

from tests.torture.attacks import bodies, grammars, queues, rows
from tests.torture.attacks.attacker import Attack, Attacker, Strike
from tests.torture.attacks.rows import plain_rows
from tests.torture.attacks.tenants import LARGE_POOL

MAX_STRIKE_S = 5.0  # so that several attacks have their turn in a window


def _flood_of(attack: Attack) -> Strike:
    """Return a strike by all clients of an attack on the queue at once."""

    async def strike(attacker: Attacker) -> None:
        await asyncio.gather(*(attack.strike(attacker) for _ in range(attack.at_once)), return_exceptions=True)

    return strike


STRIKES = [
    *(attack.strike for module in (grammars, bodies, rows) for attack in module.ATTACKS),
    *map(_flood_of, queues.ATTACKS),
]


async def _any_strike(attacker: Attacker) -> None:
    strike = attacker.chance.choice(STRIKES)
    try:
        async with asyncio.timeout(attacker.chance.uniform(0.1, MAX_STRIKE_S)):
            await strike(attacker)
    except TimeoutError:
        pass  # counted as unfinished


async def _compute(attacker: Attacker) -> None:
    """Send nothing, and use a processor for some milliseconds."""
    attacker.statuses["computed"] += sum(range(100_000)) > 0
    await asyncio.sleep(0)


ATTACKS = [
    # A yardstick: what a process of the lowest priority costs the bystander that has nothing to do with the server.
    Attack("busy-neighbour", _compute),
    Attack(
        "mix",
        _any_strike,
        at_once=8,
        control=plain_rows,
        flags=("--scheduling-policy", "fair", "--trust-request-chat-template", *LARGE_POOL),
        limits="max_concurrent_requests = 8",
    ),
]
