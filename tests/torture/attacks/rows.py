"""Attacks with sequences: options that make each token cost more, disconnects, and logprobs that fill the memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

from tests.torture.attacks.attacker import Attack, Attacker
from tests.torture.attacks.claims import Claim, Scenario, counts
from tests.torture.attacks.requests import post_json
from tests.torture.attacks.tenants import ATTACKER_KEY, LARGE_POOL, memory_mib, serving_tenants
from tests.torture.crowd import wait_until

MAX_ANSWERS = 128  # that one request may ask for with `n`
DISCONNECT_INTERVAL_S = 0.1  # 160 requests/s by 16 clients
BAD_WORDS = [f"{first} {second} {third}" for first in "abcd" for second in "efgh" for third in "ijkl"]
MANY_LONG = {"prompt": "a", "n": MAX_ANSWERS, "max_tokens": 500, "ignore_eos": True}
ALL_OPTIONS = {
    "bad_words": BAD_WORDS,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "top_k": 1000,
    "top_p": 0.99,
    "min_p": 0.0001,
    "typical_p": 0.99,
    "logit_bias": {str(token): 1.0 for token in range(300)},
}
MAX_LOGPROBS_MIB = 768
# The worst that the API accepts of each option: of its entries, or of what it computes.
WORST_OPTIONS: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": {str(token): 1.0 for token in range(300)}},
    "allowed-tokens": {"allowed_token_ids": list(range(1024))},
    "stop-tokens": {"stop_token_ids": list(range(256)), "min_tokens": 500},
    "long-bad-word": {"bad_words": ["ab " * 85, *(f"{letter}{digit}" for letter in "abcdef" for digit in range(10))]},
    "penalties": {
        "prompt": "a b " * 700,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
    "filters": {"top_k": 2000, "top_p": 0.99, "min_p": 0.0001, "typical_p": 0.99},
    "stop-strings": {"stop": [chr(ord("a") + number) * 256 for number in range(16)]},
}


async def plain_rows(attacker: Attacker) -> None:
    """Ask for as many answers as one request may have. A step takes longer with so many rows, whatever they contain."""
    await attacker.post("/generate", MANY_LONG)


async def _bad_words(attacker: Attacker) -> None:
    await attacker.post("/generate", MANY_LONG | {"bad_words": BAD_WORDS})


async def _all_options(attacker: Attacker) -> None:
    await attacker.post("/generate", MANY_LONG | ALL_OPTIONS)


def _with_option(name: str) -> Attack:
    """Return an attack with the worst of one option, compared with as many ordinary answers to the same prompt."""
    body = MANY_LONG | WORST_OPTIONS[name]
    plain = MANY_LONG | {"prompt": body["prompt"]}

    async def strike(attacker: Attacker) -> None:
        await attacker.post("/generate", body)

    async def control(attacker: Attacker) -> None:
        await attacker.post("/generate", plain)

    return Attack(name, strike, control=control, flags=LARGE_POOL)


async def _disconnect(attacker: Attacker) -> None:
    """Send a request and disconnect at a random moment, in the middle of whatever happens then."""
    await _for_an_interval(attacker, max_tokens=200, leaves_after_s=attacker.chance.random() * DISCONNECT_INTERVAL_S)


async def _stay(attacker: Attacker) -> None:
    """Send the same request as often, but for a few tokens, and read the answer."""
    await _for_an_interval(attacker, max_tokens=2, leaves_after_s=60.0)


async def _for_an_interval(attacker: Attacker, max_tokens: int, leaves_after_s: float) -> None:
    over = asyncio.create_task(asyncio.sleep(DISCONNECT_INTERVAL_S))
    num_answers = attacker.chance.choice([1, 1, 8])
    body = {"prompt": "Once upon a time", "n": num_answers, "max_tokens": max_tokens, "ignore_eos": True}
    with suppress(TimeoutError):
        async with asyncio.timeout(leaves_after_s):
            await attacker.post("/generate", body)
    await over


def logprobs_in_memory(seconds: float, chance: Random) -> list[Claim]:
    """Ask six times at once for 1,024 answers of 190 tokens, each with the logprobs of 20 tokens."""
    body = {"prompts": ["a"] * 8, "n": MAX_ANSWERS, "max_tokens": 190, "logprobs": 20}

    async def ask(port: int) -> list[str]:
        answers = await asyncio.gather(*(post_json(port, ATTACKER_KEY, "/generate", body) for _ in range(6)))
        return [answer.summary for answer in answers]

    async def ask_and_watch() -> tuple[list[str], float, float]:
        before = most = memory_mib(server)["server"]
        asking = asyncio.create_task(ask(server.port))

        def is_done() -> bool:
            nonlocal most
            most = max(most, memory_mib(server)["server"])
            return asking.done()

        await wait_until(is_done, 300, pause_s=0.05)
        return await asking, before, most

    with serving_tenants("logprobs-memory", "--model", "sim:instant", "--num-kv-blocks", "65536") as server:
        summaries, before, most = asyncio.run(ask_and_watch())
    more = most - before
    kinds = counts({each: summaries.count(each) for each in summaries})
    return [
        Claim(f"the server's memory <= +{MAX_LOGPROBS_MIB} MiB", f"+{more:,.0f} MiB", more <= MAX_LOGPROBS_MIB),
        Claim("200, 429 or 503", kinds, all(each[:3] in ("200", "429", "503") for each in summaries)),
    ]


ATTACKS = [
    Attack("bad-words", _bad_words, control=plain_rows, flags=LARGE_POOL),
    Attack("all-options", _all_options, control=plain_rows, flags=LARGE_POOL),
    *map(_with_option, WORST_OPTIONS),
    Attack("disconnects", _disconnect, at_once=16, control=_stay, control_at_once=16),
]
SCENARIOS = [Scenario("logprobs-memory", logprobs_in_memory)]
