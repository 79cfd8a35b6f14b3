"""Attacks on queue and slots: a flood, long answers in all slots, and requests for more answers than a quota allows."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

from tests.support.server_process import ServerProcess
from tests.torture.attacks.attacker import Attack, Attacker, AttackerProcess
from tests.torture.attacks.claims import Claim, Scenario
from tests.torture.attacks.modest import modest_beside
from tests.torture.attacks.requests import Answer, post_json
from tests.torture.attacks.rows import MAX_ANSWERS
from tests.torture.attacks.tenants import BYSTANDER_KEY, LARGE_POOL, serving_tenants

FAIR = ("--scheduling-policy", "fair", *LARGE_POOL)
NUM_FLOODING = 200
NUM_SHORT, SHORT_S, PATIENCE_S = 5, 2.0, 15.0
NUM_SLOTS = 16
LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
MODEST = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True}


async def _short_story(attacker: Attacker) -> None:
    await attacker.post("/generate", MODEST)


async def _few_rows(attacker: Attacker) -> None:
    await attacker.post("/generate", MODEST | {"n": 8, "max_tokens": 500})


async def _many_long_answers(attacker: Attacker) -> None:
    await attacker.post("/generate", {"prompt": "a", "n": MAX_ANSWERS, "max_tokens": 500, "ignore_eos": True})


async def _long_answer(attacker: Attacker) -> None:
    await attacker.post("/generate", LONG)


async def _half_of_the_slots(attacker: Attacker) -> None:
    await attacker.post("/generate", LONG | {"n": NUM_SLOTS // 2})


FLOOD = Attack(
    "flood",
    _short_story,
    at_once=NUM_FLOODING,
    control=_few_rows,
    flags=(*FAIR, "--max-num-seqs", "16", "--max-num-queued-reqs", "64"),
)
ALL_SLOTS = Attack(
    "all-slots",
    _long_answer,
    at_once=2 * NUM_SLOTS,
    control=_half_of_the_slots,
    flags=(*FAIR, "--max-num-seqs", str(NUM_SLOTS)),
    limits=f"max_concurrent_requests = {2 * NUM_SLOTS}",
)
QUOTA = Attack(
    "quota-by-n",
    _many_long_answers,
    at_once=40,
    flags=(*FAIR, "--max-num-seqs", "192"),  # for one such request, and for others
    limits="max_concurrent_requests = 40\nrequests_per_minute = 60\ntokens_per_minute = 1000",
)


def short_beside_many_answers(seconds: float, chance: Random) -> list[Claim]:
    """Ask for far more answers than a quota has tokens for; then another tenant sends short requests, one by one."""
    short = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}

    async def attack_and_ask(server: ServerProcess) -> tuple[list[Answer], float]:
        async with AttackerProcess(QUOTA.name, server.port, chance.randrange(1000)) as attacker:
            attacker.begin("attack")
            await asyncio.sleep(5)
            names = ("servekit_num_requests_running", "servekit_num_requests_waiting")
            num_admitted = sum([await asyncio.to_thread(server.metric, name) for name in names])
            answers = []
            for _ in range(NUM_SHORT):
                with suppress(TimeoutError):
                    asking = post_json(server.port, BYSTANDER_KEY, "/generate", short)
                    answers.append(await asyncio.wait_for(asking, PATIENCE_S))
            await attacker.rest()
            return answers, num_admitted

    with serving_tenants(QUOTA.name, *QUOTA.flags, limits=QUOTA.limits) as server:
        answers, num_admitted = asyncio.run(attack_and_ask(server))
    num_right = sum(answer.status == 200 for answer in answers)
    longest_s = max([answer.seconds for answer in answers], default=PATIENCE_S)
    return [
        Claim(
            f"the other tenant gets {NUM_SHORT} of {NUM_SHORT} within {PATIENCE_S:g} s",
            f"{num_right}",
            num_right == NUM_SHORT,
        ),
        Claim(f"each within {SHORT_S:g} s", f"within {longest_s:.2f} s", longest_s <= SHORT_S, is_timed=True),
        Claim("", f"{num_admitted:,.0f} answers of the attacker admitted"),
    ]


ATTACKS = [FLOOD, ALL_SLOTS, QUOTA]
SCENARIOS = [
    Scenario("modest-tenant", modest_beside(FLOOD, "/generate", MODEST)),
    Scenario("short-beside-many", short_beside_many_answers),
]
