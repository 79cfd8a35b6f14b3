"""Attacks with grammars: their memory, their masks, their compilation, and what they leave for others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.grammar_matcher import grammar_tokenizer, matcher_for
from servekit.requests.generation import GrammarKind
from servekit.sandbox.compile_grammar import compile_grammar
from servekit.sandbox.jobs import CompileGrammar, Done
from tests.support.server_process import ServerProcess
from tests.torture.attacks.attacker import Attack, Attacker
from tests.torture.attacks.claims import Claim, Scenario, counts
from tests.torture.attacks.requests import post_json
from tests.torture.attacks.rows import MAX_ANSWERS, plain_rows
from tests.torture.attacks.tenants import (
    ATTACKER_KEY,
    BYSTANDER_KEY,
    GIVES_UP_AT_MIB,
    LARGE_POOL,
    MAX_MORE_MIB,
    MEMORY_INTERVAL_S,
    memory_mib,
    serving_tenants,
)
from tests.torture.crowd import wait_until
from tests.torture.streams import Connections, End, Reply, RequestSpec, ask

NUM_TERMINALS = 300
NUM_GRAMMARS = 300
NUM_TOKENS = 16  # of an answer; without limits, six of them took up to 690 MB
MAX_FILLING_S = 1500
NUM_EXHAUSTING = 12  # answers
DEMO_VOCAB_SIZE, DEMO_EOS = 2048, [2]
NUM_COMPILING = 8  # clients that send 32 new grammars a second together, at most


def overlapping_terminals(number: int) -> str:
    """Return 9 KB of Lark whose terminals overlap; each number changes one character of it.

    A terminal ends a number of letters after one letter, so the lexer has to remember the places of ten letters.
    """
    letters = [chr(ord("a") + index // 30) for index in range(NUM_TERMINALS)]
    letters[number % NUM_TERMINALS] = chr(ord("k") + number // NUM_TERMINALS % 16)
    lines = [f"T{index}: /[a-z]*{letter}[a-z]{{{index % 30}}}/" for index, letter in enumerate(letters)]
    return "\n".join([f"start: ({'|'.join(f'T{index}' for index in range(NUM_TERMINALS))})*", *lines])


# Each text of this grammar has exponentially many derivations.
AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "a" "a"'


def _with_grammar(kind: str, value: object, **fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "grammar": {"type": kind, "value": value}, **fields}


def _hostile(number: int, num_tokens: int) -> dict[str, Any]:
    """Return a request for tokens that are as different as the grammar allows."""
    varied = {"min_tokens": num_tokens, "max_tokens": num_tokens, "temperature": 2.0}
    return _with_grammar("ebnf", overlapping_terminals(number), **varied)


async def _new_overlapping_terminals(attacker: Attacker) -> None:
    await attacker.post("/generate", _hostile(attacker.number(), 400))


async def _ambiguous(attacker: Attacker) -> None:
    await attacker.post("/generate", _with_grammar("ebnf", AMBIGUOUS, n=MAX_ANSWERS, max_tokens=500))


async def _ambiguous_alone(attacker: Attacker) -> None:
    await attacker.post("/generate", _with_grammar("ebnf", AMBIGUOUS, max_tokens=2000))


async def _one_plain_row(attacker: Attacker) -> None:
    await attacker.post("/generate", {"prompt": "a", "max_tokens": 1900, "ignore_eos": True})


async def _slow_to_compile(attacker: Attacker) -> None:
    schema = {"type": "integer", "multipleOf": 99_999_989 - attacker.number()}
    await attacker.post("/generate", _with_grammar("json_schema", schema, max_tokens=4))


async def _small_new_grammar(attacker: Attacker) -> None:
    schema = {"enum": [f"attacker {attacker.number()}", "none"]}
    await attacker.post("/generate", _with_grammar("json_schema", schema, max_tokens=4))
    await asyncio.sleep(NUM_COMPILING / 32)


async def _large_chat(attacker: Attacker) -> None:
    messages = [{"role": "user", "content": "a" * (8_000_000 - attacker.chance.randrange(1000))}]
    await attacker.post("/v1/chat/completions", {"model": "demo", "messages": messages})


async def _endless_template(attacker: Attacker) -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + str(attacker.number())
    messages = [{"role": "user", "content": "hi"}]
    await attacker.post("/v1/chat/completions", {"model": "demo", "messages": messages, "chat_template": template})


def fill_memory(seconds: float, chance: Random) -> list[Claim]:
    """Send 300 large grammars, six at a time, and watch the memory of all processes."""
    num_grammars, first = max(12, round(NUM_GRAMMARS * seconds / 10)), chance.randrange(1000)
    statuses: dict[str, int] = {}

    async def send_all(server: ServerProcess) -> float:
        before, most = memory_mib(server), 0.0
        numbers = iter(range(first, first + num_grammars))

        async def send() -> None:
            for number in numbers:
                answer = await post_json(server.port, ATTACKER_KEY, "/generate", _hostile(number, NUM_TOKENS))
                statuses[answer.summary] = statuses.get(answer.summary, 0) + 1

        sending = asyncio.gather(*(send() for _ in range(6)))

        def is_over() -> bool:
            nonlocal most
            most = max(most, sum(memory_mib(server).values()) - sum(before.values()))
            return sending.done() or most > GIVES_UP_AT_MIB

        await wait_until(is_over, MAX_FILLING_S, pause_s=MEMORY_INTERVAL_S)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return most

    with serving_tenants("grammar-memory") as server:
        more_mib = asyncio.run(send_all(server))
    return [
        Claim(f"memory <= +{MAX_MORE_MIB:,} MiB", f"+{more_mib:,.0f} MiB", more_mib <= MAX_MORE_MIB),
        Claim(
            f"after {num_grammars} grammars",
            f"after {sum(statuses.values())} grammars ({counts(statuses)})",
            sum(statuses.values()) == num_grammars,
            is_timed=True,
        ),
    ]


# Each pattern alone is small. The lexer's states for all of them together are the places of sixteen letters.
PATTERNS = [f"{chr(ord('a') + index)}.{{{index + 3}}}$" for index in range(16)]
ITEMS = {"anyOf": [{"type": "string", "pattern": pattern} for pattern in PATTERNS]}
SHARED_SCHEMA = {"type": "array", "minItems": 20, "items": ITEMS}


def exhaust_shared_schema(seconds: float, chance: Random) -> list[Claim]:
    """Tenant a uses a schema until its lexer has too many states; then tenant b uses the same schema."""
    body = _with_grammar("json_schema", SHARED_SCHEMA, max_tokens=100, temperature=2.0)
    # At this temperature all tokens that the schema allows are about as probable, so almost each one makes new states.
    varied = _with_grammar("json_schema", SHARED_SCHEMA, max_tokens=150, temperature=100.0)
    spent = [
        RequestSpec(f"seed {seed}", "/generate_stream", varied | {"seed": seed})
        for seed in chance.sample(range(1000), NUM_EXHAUSTING)
    ]

    async def ask_for_it(port: int) -> tuple[list[Reply], list[str]]:
        connections = Connections(port, api_key=ATTACKER_KEY)
        replies = await asyncio.gather(*(ask(connections, asked) for asked in spent))
        bystander = [await post_json(port, BYSTANDER_KEY, "/generate", body | {"seed": seed}) for seed in range(10)]
        return replies, [each.summary for each in bystander]

    with serving_tenants("shared-schema", *LARGE_POOL) as server:
        replies, bystander = asyncio.run(ask_for_it(server.port))
    num_right = bystander.count("200")
    num_masks, error = _masks_of_one_lexer([reply.answers[0] for reply in replies if reply.end is End.WHOLE])
    return [
        Claim("the other tenant gets 10 of 10", f"{num_right} of 10 ({counts(Counter(bystander))})", num_right == 10),
        Claim(
            "the attacker's answers are more than one lexer can follow",
            f"{error} after {num_masks:,} masks",
            bool(error),
        ),
        Claim("", f"the attacker's answers: {counts(Counter(str(reply.end) for reply in replies))}"),
    ]


def _masks_of_one_lexer(answers: list[list[int]]) -> tuple[int, str]:
    """Follow answers one after the other with one lexer, which is never replaced.

    Returns how many masks it computed, and the error that ended it; empty if it did not end.
    """
    tokenizer = grammar_tokenizer(DEMO_MODEL_PATH / "tokenizer.json", DEMO_VOCAB_SIZE, DEMO_EOS)
    grammar = compile_grammar(CompileGrammar(GrammarKind.JSON_SCHEMA, json.dumps(SHARED_SCHEMA)), tokenizer)
    assert isinstance(grammar, Done)
    root, num_masks = matcher_for(grammar.text, tokenizer), 0
    for token_ids in answers:
        matcher = root.deep_copy()
        for token_id in token_ids:
            matcher.compute_bitmask()
            if matcher.is_error():
                return num_masks, matcher.get_error().split("\n")[0]
            num_masks += 1
            matcher.consume_token(token_id)
    return num_masks, ""


ATTACKS = [
    Attack("overlapping-terminals", _new_overlapping_terminals, at_once=6),
    Attack("ambiguous-grammar", _ambiguous_alone, control=_one_plain_row),
    Attack("ambiguous-grammar-128", _ambiguous, control=plain_rows, flags=LARGE_POOL),
    Attack("slow-grammars", _slow_to_compile, at_once=6),
    Attack("new-grammars", _small_new_grammar, at_once=NUM_COMPILING),
    Attack("large-chats", _large_chat, at_once=5),
    Attack("endless-templates", _endless_template, at_once=6, flags=("--trust-request-chat-template",)),
]
SCENARIOS = [Scenario("grammar-memory", fill_memory), Scenario("shared-schema", exhaust_shared_schema)]
