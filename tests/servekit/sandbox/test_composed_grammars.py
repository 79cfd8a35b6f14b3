"""What a composed grammar lets a model write is read by the parser of the same format, and matches the schemas.

The grammars are compiled by llguidance, and random tokens that it allows are the model.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.parsing.chat_format import REASONING_FORMATS, TOOL_FORMATS, Function, ToolUse, choose_chat_format
from servekit.protocol.grammar_matcher import grammar_tokenizer, matcher_for
from servekit.requests.generation import Grammar, GrammarKind
from servekit.sandbox.compile_grammar import compile_grammar
from servekit.sandbox.jobs import CompileGrammar, Done, Outcome, Refused
from tests.support.chat_answers import events_of, message

FILE = DEMO_MODEL_PATH / "tokenizer.json"
VOCAB_SIZE, EOS = 2048, 2
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "get_time": EMPTY}
USE = ToolUse(tuple(Function(name, json.dumps(schema)) for name, schema in SCHEMAS.items()), is_demanded=True)
# The demo model's special tokens stand for those of other models.
TOKENS = {"<think>": 3, "</think>": 4, "<|channel|>": 3, "<|end|>": 4, "<|message|>": 5, "<tool_call>": 5}


@pytest.fixture(scope="module")
def model() -> LLTokenizer:
    return grammar_tokenizer(FILE, VOCAB_SIZE, [EOS])


def compiled(grammar: Grammar, model: LLTokenizer) -> Outcome:
    return compile_grammar(CompileGrammar(grammar.kind, grammar.text, grammar.parts), model)


def walk(
    grammar: Grammar, model: LLTokenizer, seed: int, max_tokens: int = 400, preferred: int | None = None
) -> list[int]:
    """Return tokens that the grammar allows, without the end of sequence, which comes last if there is room.

    `preferred` is the token that is taken where it is allowed, from the fifth one on.
    """
    outcome = compiled(grammar, model)
    assert isinstance(outcome, Done), outcome
    matcher, rng, token_ids = matcher_for(outcome.text, model), random.Random(seed), list[int]()
    for _ in range(max_tokens):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        chosen = rng.choice([token_id for token_id in range(VOCAB_SIZE) if bits >> token_id & 1])
        if preferred is not None and len(token_ids) >= 4 and bits >> preferred & 1:
            chosen = preferred
        matcher.consume_token(chosen)
        if chosen == EOS:
            return token_ids
        token_ids.append(chosen)
    return token_ids


@pytest.mark.parametrize("tools", [name for name in TOOL_FORMATS if name != "openai"])
def test_demanded_calls_match_their_schemas(tools: str, model: LLTokenizer) -> None:
    decode = Tokenizer.from_file(str(FILE)).decode
    wanted = choose_chat_format("", "none", tools, {}.get, (EOS,)).for_answers("", USE, None, None)
    assert wanted.grammar is not None
    names = set()
    for seed in range(6):
        found = message(events_of(wanted, [decode(walk(wanted.grammar, model, seed, 2000))]))
        assert found.keys() == {"calls"}
        for name, arguments in found["calls"]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            names.add(name)
    assert names == {*SCHEMAS}


@pytest.mark.parametrize(("prompt", "begins"), [("<think>", True), ("", False)])
def test_reasoning_is_bounded_and_the_content_matches_behind_it(prompt: str, begins: bool, model: LLTokenizer) -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(CITY), "response_format")
    formats = choose_chat_format("", "qwen3", "none", TOKENS.get, (EOS,))
    grammar = formats.for_answers(prompt, None, schema, 5).grammar
    assert grammar is not None
    lengths = set()
    for seed in range(20):
        token_ids = walk(grammar, model, seed)
        if 4 in token_ids:
            reasoning, content = token_ids[: token_ids.index(4)], token_ids[token_ids.index(4) + 1 :]
            lengths.add(len(reasoning) - (not begins))
        else:
            assert not begins
            content = token_ids
        jsonschema.validate(json.loads(Tokenizer.from_file(str(FILE)).decode(content)), CITY)
    assert lengths == {5}, "a random model never ends it by itself"


@pytest.mark.parametrize("prompt", ["<think>", ""])
def test_reasoning_of_a_free_answer_is_bounded(prompt: str, model: LLTokenizer) -> None:
    formats = choose_chat_format("", "qwen3", "none", TOKENS.get, (EOS,))
    grammar = formats.for_answers(prompt, None, None, 3).grammar
    assert grammar is not None
    for seed in range(10):
        token_ids = walk(grammar, model, seed, 12)
        assert token_ids[3 + (prompt == "")] == 4 if prompt or token_ids[0] == 3 else 3 not in token_ids[:1]


def test_harmonys_grammars_compile(model: LLTokenizer) -> None:
    formats = choose_chat_format("", "openai_gptoss", "openai", TOKENS.get, (EOS,))
    schema = Grammar(GrammarKind.JSON, "", "response_format")
    for wanted in (formats.for_answers("", USE, None, 3), formats.for_answers("", None, schema, None)):
        assert wanted.grammar is not None and isinstance(compiled(wanted.grammar, model), Done)
    budget = formats.for_answers("", None, None, 3).grammar
    assert budget is not None and isinstance(compiled(budget, model), Done)


@pytest.mark.parametrize("reasoning", [name for name in REASONING_FORMATS if name != "openai_gptoss"])
def test_a_grammar_follows_tags_that_are_text(reasoning: str, model: LLTokenizer) -> None:
    schema = Grammar(GrammarKind.CHOICE, '["yes", "no"]', "response_format")
    formats = choose_chat_format("", reasoning, "none", {}.get, (EOS,))
    tags: Any = REASONING_FORMATS[reasoning]
    grammar = formats.for_answers(tags.opening, None, schema, None).grammar
    assert grammar is not None
    outcome = compiled(grammar, model)
    assert isinstance(outcome, Done)
    matcher = matcher_for(outcome.text, model)
    tokenizer = Tokenizer.from_file(str(FILE))
    for token_id in tokenizer.encode(f"I think: no.{tags.closing}yes", add_special_tokens=False).ids:
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()


def test_calls_with_a_strict_schema_may_follow_free_text(model: LLTokenizer) -> None:
    use = ToolUse((Function("get_weather", json.dumps(CITY), is_strict=True),), is_parallel=False)
    grammar = choose_chat_format("", "none", "hermes", TOKENS.get, (EOS,)).for_answers("", use, None, None).grammar
    assert grammar is not None
    decode = Tokenizer.from_file(str(FILE)).decode
    for seed in range(6):
        token_ids = walk(grammar, model, seed, preferred=TOKENS["<tool_call>"])
        assert token_ids.index(TOKENS["<tool_call>"]) == 4, "any other text comes before"
        call = json.loads(decode(token_ids[5:]).removesuffix("</tool_call>"))
        assert call["name"] == "get_weather"
        jsonschema.validate(call["arguments"], CITY)


STRICT = ToolUse((Function("get_weather", json.dumps(CITY), is_strict=True), Function("get_time")), is_parallel=False)
RIGHT, WRONG = '{"city": "Rome", "days": 3}', '{"city": "Oslo'


@pytest.mark.parametrize(
    ("tools", "text", "is_allowed"),
    [
        ("hermes", "Any text, with <tool_cal and {}", True),
        ("hermes", f'I look.<tool_call>\n{{"name": "get_weather", "arguments": {RIGHT}}}\n</tool_call>', True),
        ("hermes", f'I look.<tool_call>\n{{"name": "get_weather", "arguments": {WRONG}', False),
        ("hermes", "<tool_call> is a tag", False),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {RIGHT}}}]', True),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {WRONG}', False),
        ("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WRONG}", False),
        ("qwen3_coder", f'<tool_call>\n{{"name": "get_weather", "arguments": {WRONG}', False),
        ("llama3_json", "Any text.", True),
        ("llama3_json", '{"any": "JSON", "name": "get_weather_now"}', True),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {RIGHT}}}', True),
        ("llama3_json", f'{{"type": "function", "name": "get_weather", "parameters": {RIGHT}}}', True),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {WRONG}', False),
        ("llama3_json", f'{{"type": "function", "name": "get_weather", "parameters": {WRONG}', False),
        ("llama3_json", '{"parameters": {"city": "Oslo"}, "name": "get_weather"', False),
        ("llama3_json", '{"name": "get_time", "parameters": {"any": 1}}', True),
        (
            "openai",
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{RIGHT}",
            True,
        ),
        ("openai", "<|channel|>final<|message|>Any text.", True),
        (
            "openai",
            f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WRONG}",
            False,
        ),
    ],
)
def test_a_strict_call_must_match_its_schema_and_all_other_text_is_allowed(
    tools: str, text: str, is_allowed: bool, model: LLTokenizer
) -> None:
    tokens = TOKENS if tools == "openai" else {}
    grammar = choose_chat_format("", "none", tools, tokens.get, (EOS,)).for_answers("", STRICT, None, None).grammar
    assert grammar is not None
    outcome = compiled(grammar, model)
    assert isinstance(outcome, Done), outcome
    matcher = matcher_for(outcome.text, model)
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    tokenizer = Tokenizer.from_file(str(FILE))
    encoded = [
        tokenizer.encode(each, add_special_tokens=False).ids if each not in tokens else [tokens[each]]
        for each in pieces
    ]
    token_ids = [token_id for ids in encoded for token_id in ids]
    num_allowed = matcher.try_consume_tokens(token_ids)
    assert (num_allowed == len(token_ids) and matcher.is_accepting()) is is_allowed
    assert num_allowed > 0


@pytest.mark.parametrize("schema", [{"type": "array", "uniqueItems": True}, {"type": 5}])
def test_the_part_that_cannot_be_compiled_is_named(schema: Any, model: LLTokenizer) -> None:
    use = ToolUse((Function("fine"), Function("odd", json.dumps(schema))), is_demanded=True)
    grammar = choose_chat_format("", "none", "hermes", {}.get, (EOS,)).for_answers("", use, None, None).grammar
    assert grammar is not None
    outcome = compiled(grammar, model)
    assert isinstance(outcome, Refused) and outcome.message.startswith("the parameters of 'odd': ")


def test_a_client_cannot_send_a_composed_grammar_with_a_faulty_text(model: LLTokenizer) -> None:
    outcome = compile_grammar(CompileGrammar(GrammarKind.COMPOSED, "start: @part0", ()), model)
    assert isinstance(outcome, Refused)
