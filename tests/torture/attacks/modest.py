"""A scenario: one tenant asks twice a second, while another one attacks the same model without pause."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from random import Random
from typing import Any

from tests.torture.attacks.attacker import Attack, AttackerProcess
from tests.torture.attacks.claims import Claim, counts
from tests.torture.attacks.requests import Answer, post_json
from tests.torture.attacks.tenants import BYSTANDER_KEY

MAX_MODEST, MODEST_EACH_S = 25, 6  # requests; so many for each second of a short run
MODEST_INTERVAL_S = 0.5
LEAD_S = 3.0  # so much earlier than the first request the attack begins


def modest_beside(
    attack: Attack, path: str, body: dict[str, Any], within_s: float | None = None
) -> Callable[[float, Random], list[Claim]]:
    """Return a scenario: all requests of the modest tenant must be served, each within `within_s` if it is given."""

    def run(seconds: float, chance: Random) -> list[Claim]:
        number = min(MAX_MODEST, max(1, round(MODEST_EACH_S * seconds)))
        with attack.serving() as server:
            asking = _ask(server.port, attack, path, body, number, chance.randrange(1000))
            answers, statuses = asyncio.run(asking)
            num_tracebacks = server.log.read_text().count("Traceback")
        summaries = [answer.summary for answer in answers]
        num_right = summaries.count("200")
        kinds = counts({each: summaries.count(each) for each in summaries})
        median_s = statistics.median(answer.seconds for answer in answers)
        longest_s = max(answer.seconds for answer in answers)
        times = f"at the median after {median_s:.2f} s, at most after {longest_s:.2f} s"
        return [
            Claim(f"the modest tenant gets {number} of {number}", f"{num_right} ({kinds})", num_right == number),
            Claim("", times)
            if within_s is None
            else Claim(f"each within {within_s:g} s", times, longest_s <= within_s, is_timed=True),
            Claim("", f"the attacker's answers: {counts(statuses)}"),
            Claim("no traceback", f"{num_tracebacks} tracebacks", num_tracebacks == 0),
        ]

    return run


async def _ask(
    port: int, attack: Attack, path: str, body: dict[str, Any], number: int, seed: int
) -> tuple[list[Answer], dict[str, int]]:
    async with AttackerProcess(attack.name, port, seed) as attacker:
        attacker.begin("attack")
        await asyncio.sleep(LEAD_S)
        asking = []
        for _ in range(number):
            asking.append(asyncio.create_task(post_json(port, BYSTANDER_KEY, path, body)))
            await asyncio.sleep(MODEST_INTERVAL_S)
        return await asyncio.gather(*asking), await attacker.rest()
