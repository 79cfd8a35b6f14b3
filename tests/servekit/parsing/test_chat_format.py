"""Every format reads the answers that its models write, in whatever pieces they arrive, and writes their grammars."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.config import ReasoningParser, ToolCallParser
from servekit.errors import InvalidRequest
from servekit.parsing.answer_events import AnswerEvent, CallArguments, CallBegins
from servekit.parsing.chat_format import (
    HARMONY,
    PARSED_ANSWERS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    Function,
    ToolUse,
    choose_chat_format,
)
from servekit.parsing.lark import Lark
from servekit.parsing.reasoning import NoReasoning
from servekit.requests.generation import Grammar, GrammarKind
from tests.support.chat_answers import TOOLS, answer_format, chat_format, events_of, message, parse, split

Found = dict[str, Any]
THINK = {"<think>": 7, "</think>": 8, "<tool_call>": 9, "</tool_call>": 10}
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
HARMONY_TOKENS = {"<|start|>": 20, "<|channel|>": 21, "<|message|>": 22, "<|end|>": 23, "<|constrain|>": 24}
JSON = Grammar(GrammarKind.JSON, "", "response_format")
DEMANDED = ToolUse((Function("add"),), is_demanded=True, is_parallel=False)
STRICT = ToolUse((Function("add", is_strict=True),), is_parallel=False)

# (reasoning, tools, what the model writes, what that means), as the model cards and chat templates show it
ANSWERS: list[tuple[str, str, str, Found]] = [
    ("none", "none", " Hello ", {"content": " Hello "}),
    (
        "qwen3",
        "hermes",
        '<think>\nParis?\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
        {
            "content": "I look.",
            "reasoning": "Paris?",
            "calls": [("get_weather", '{"city": "Paris"}'), ("add", '{"a": [1, {"b": "}"}]}')],
        },
    ),
    ("qwen3", "none", "Just an answer.", {"content": "Just an answer."}),
    ("deepseek_r1", "none", "Hm\n</think>\n\nYes. </think>", {"reasoning": "Hm", "content": "Yes. </think>"}),
    ("deepseek_r1", "none", "<think>Hm</think>Yes", {"reasoning": "Hm", "content": "Yes"}),
    ("deepseek_r1", "none", "Hm, it was cut ", {"reasoning": "Hm, it was cut "}),
    (
        "mistral",
        "mistral",
        '[THINK]Hm.[/THINK]Sure.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add"}]',
        {"reasoning": "Hm.", "content": "Sure.", "calls": [("add", '{"a": 1}'), ("add", "{}")]},
    ),
    (
        "none",
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abc123def[ARGS] {"a": 2}[TOOL_CALLS]add{"a": 3}',
        {"calls": [("add", '{"a": 1}'), ("add", '{"a": 2}'), ("add", '{"a": 3}')]},
    ),
    (
        "deepseek_r1",
        "deepseek_v3",
        f'Hm</think>Ok.{DEEPSEEK}function<｜tool▁sep｜>add\n```json\n{{"a": 1}}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        {"reasoning": "Hm", "content": "Ok.", "calls": [("add", '{"a": 1}'), ("add", '{"a": 2}')]},
    ),
    (
        "none",
        "deepseek_v31",
        f'{DEEPSEEK}add<｜tool▁sep｜>{{"a": 1}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        {"calls": [("add", '{"a": 1}')]},
    ),
    (
        "none",
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
        {"calls": [("add", '{"a": 1}'), ("add", "{}")]},
    ),
    ("none", "llama3_json", '{"name": "Tom", "age": 7}', {"content": '{"name": "Tom", "age": 7}'}),
    ("none", "llama3_json", '{"name": "add", "parameters": {}} done', {"content": "done", "calls": [("add", "{}")]}),
    (
        "none",
        "pythonic",
        "[get_weather(city='Paris', days=[1, True]), add()]",
        {"calls": [("get_weather", '{"city": "Paris", "days": [1, true]}'), ("add", "{}")]},
    ),
    ("none", "pythonic", '{"name": "add", "parameters": {}}', {"calls": [("add", "{}")]}),
    (
        "openai_gptoss",
        "openai",
        "<|channel|>analysis<|message|>Weather?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}',
        {"reasoning": "Weather?", "content": "I look.", "calls": [("get_weather", '{"city": "Rome"}')]},
    ),
    (
        "qwen3",
        "qwen3_coder",
        "<think>\nHm\n</think>\n\nI look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n"
        "</tool_call>",
        {
            "reasoning": "Hm",
            "content": "I look.",
            "calls": [("get_weather", '{"city": "Paris", "days": 3}'), ("add", "{}")],
        },
    ),
    (
        "none",
        "qwen3_coder",
        '<function=add>\n<parameter=a>\n[1, {"b": null}]\n</parameter>\n</function>\n</tool_call> done',
        {"calls": [("add", '{"a": [1, {"b": null}]}')], "content": "done"},
    ),
    (
        "none",
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>[3]</arg_value>\n</tool_call>\n<tool_call>add</tool_call>",
        {"content": "I look.", "calls": [("get_weather", '{"city": "Paris", "days": [3]}'), ("add", "{}")]},
    ),
    (  # GLM-4.7
        "none",
        "glm45",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>x</arg_value></tool_call>",
        {"calls": [("add", '{"a": 1, "b": "x"}')]},
    ),
    # what is no call stays content
    ("none", "qwen3_coder", "<tool_call> is a tag", {"content": "<tool_call> is a tag"}),
    ("none", "qwen3_coder", "Write <function=name>, then", {"content": "Write <function=name>, then"}),
    ("none", "qwen3_coder", "<tool_call><function=>x", {"content": "<tool_call><function=>x"}),
    ("none", "glm45", "<tool_call> is a tag", {"content": "<tool_call> is a tag"}),
    ("none", "glm45", "<tool_call><arg_key>", {"content": "<tool_call><arg_key>"}),
    ("none", "hermes", 'a <tool_call> {"name": 1} <tool_c', {"content": 'a <tool_call> {"name": 1} <tool_c'}),
    ("none", "hermes", '<tool_call>\n{"name": "add", "argum', {"content": '<tool_call>\n{"name": "add", "argum'}),
    ("none", "mistral", "[TOOL_CALLS] what?", {"content": "[TOOL_CALLS] what?"}),
    ("none", "deepseek_v3", f"{DEEPSEEK}function", {"content": f"{DEEPSEEK}function"}),
    # a call that was cut, or goes on wrongly, has begun
    ("none", "qwen3_coder", "<function=add>\n<parameter=a>\n[1", {"calls": [("add", '{"a": ')]}),
    ("none", "qwen3_coder", "<function=add>oh", {"calls": [("add", "{}")], "content": "oh"}),
    ("none", "glm45", "<tool_call>add<arg_key>a</arg_key>oh", {"calls": [("add", "{}")], "content": "a</arg_key>oh"}),
    (
        "none",
        "glm45",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>oh",
        {"calls": [("add", '{"a": 1}')], "content": "oh"},
    ),
    ("none", "hermes", '<tool_call>{"name": "add", "arguments": {"a": "b', {"calls": [("add", '{"a": "b')]}),
    (
        "none",
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1} x</tool_call>',
        {"content": "x</tool_call>", "calls": [("add", '{"a": 1}')]},
    ),
    ("none", "mistral", '[TOOL_CALLS]add[ARGS]{"a": ]}', {"calls": [("add", '{"a": ]')], "content": "}"}),
    ("none", "mistral", "[TOOL_CALLS]add[ARGS]", {"calls": [("add", "")]}),
    (
        "none",
        "deepseek_v31",
        f"{DEEPSEEK}add<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>then",
        {"calls": [("add", "{}")], "content": "then"},
    ),
]


def merged(events: list[AnswerEvent]) -> list[tuple[Any, ...]]:
    """Return the events in order, with neighbors of the same kind joined."""
    flat = [
        (type(event), getattr(event, "index", 0), event.name if isinstance(event, CallBegins) else event.text)
        for event in events
    ]
    return [(*key, "".join(text for *_, text in group)) for key, group in groupby(flat, key=lambda each: each[:2])]


@pytest.mark.parametrize(("reasoning", "tools", "text", "expected"), ANSWERS)
def test_answers_are_read(reasoning: str, tools: str, text: str, expected: Found) -> None:
    assert parse(answer_format(reasoning, tools), text) == expected


@pytest.mark.parametrize(("reasoning", "tools", "text", "expected"), ANSWERS)
def test_the_events_do_not_depend_on_the_pieces(reasoning: str, tools: str, text: str, expected: Found) -> None:
    wanted = answer_format(reasoning, tools)
    whole = merged(events_of(wanted, [text]))
    assert merged(events_of(wanted, list(text))) == whole
    for seed in range(40):
        assert merged(events_of(wanted, split(text, seed))) == whole, split(text, seed)


SYNTAX = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>"]
SYNTAX += ["<|end|>", "analysis", "to=functions.add ", '{"name": "add", ', '"arguments": ', "{", "}", "[", "]", ", "]
SYNTAX += ["<function=", "add", ">", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>"]
SYNTAX += [
    "<arg_value>",
    "</arg_value>",
    "add(",
    "a=",
    "1",
    "'x",
    ")",
    '"',
    "\\",
    "\n",
    " ",
    "é",
    DEEPSEEK,
    "<｜tool▁sep｜>",
    "```json",
    ";",
    ":",
]


@given(
    st.sampled_from([*TOOL_FORMATS]),
    st.sampled_from([*REASONING_FORMATS]),
    st.lists(st.sampled_from(SYNTAX), max_size=25).map("".join),
    st.integers(0, 2**32),
)
def test_nonsense_is_read_the_same_in_any_pieces(tools: str, reasoning: str, text: str, seed: int) -> None:
    wanted = answer_format(reasoning, tools)
    whole = merged(events_of(wanted, [text]))
    assert merged(events_of(wanted, split(text, seed))) == whole
    assert merged(events_of(wanted, list(text))) == whole


def test_arguments_arrive_in_pieces_while_the_model_writes_them() -> None:
    parser = answer_format("none", "hermes").make_parser()
    assert parser.feed('<tool_call>{"name": "add", "arguments": {"text": "on') == [
        CallBegins(0, "add"),
        CallArguments(0, '{"text": "on'),
    ]
    assert parser.feed("ce upon") == [CallArguments(0, "ce upon")]
    assert parser.feed(' a time"}') == [CallArguments(0, ' a time"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


def test_answers_that_their_server_has_parsed_may_have_reasoning_and_calls() -> None:
    assert PARSED_ANSWERS.has_reasoning and PARSED_ANSWERS.is_parsed
    assert PARSED_ANSWERS.make_parser().finish() == [], "nothing is held back"


def test_without_parallel_calls_further_ones_are_left_out() -> None:
    use = ToolUse((Function("add"),), is_parallel=False)
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2
    assert parse(answer_format("none", "hermes", use=use), text) == {"calls": [("add", '{"a": 1}')]}


def test_without_tools_a_call_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse(answer_format("qwen3", "hermes", use=None), text) == {"content": text}


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|assistant|><think>\n", "Hm.</think>Yes", {"reasoning": "Hm.", "content": "Yes"}),
        ("<|assistant|><think>\n\n</think>\n\n", "<think> is a tag", {"content": "<think> is a tag"}),
        ("What is <think>?<|assistant|>", "\n<think>Hm.</think>Yes", {"reasoning": "Hm.", "content": "Yes"}),
    ],
)
def test_the_prompt_tells_whether_reasoning_has_begun(prompt: str, text: str, expected: Found) -> None:
    assert parse(answer_format("qwen3", prompt=prompt), text) == expected


def test_a_parser_says_whether_the_next_text_is_reasoning() -> None:
    parser = answer_format("qwen3").make_parser()
    seen = [parser.is_reasoning]
    for piece in ("<think>", "Hm", "</think>", "Yes"):
        parser.feed(piece)
        seen.append(parser.is_reasoning)
    assert seen == [False, True, True, False, False]


def test_markers_and_ids_are_those_of_the_formats() -> None:
    assert all(answer_format(tools=name).markers for name in TOOL_FORMATS)
    assert NoReasoning().content("@part0", Lark({}.get, ())) == "@part0"
    assert answer_format("qwen3", "hermes").markers == ("<think>", "</think>", "<tool_call>", "</tool_call>")
    assert [answer_format(tools=name).call_id_length for name in ("none", "hermes", "mistral")] == [None, None, 9]
    plain, parsed = answer_format(), answer_format("qwen3")
    assert not plain.is_parsed and not plain.has_reasoning and plain.markers == ()
    assert parsed.is_parsed and parsed.has_reasoning


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("", "none", "none"),
        ("{{ messages }}", "none", "none"),
        ("<tool_call>\\n{...}</tool_call> <think>", "qwen3", "hermes"),
        ("content.split('</think>')[-1] <｜tool▁calls▁begin｜> ```json", "qwen3", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "none", "deepseek_v31"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<tool_call><function=name><parameter=", "none", "qwen3_coder"),
        ("<seed:tool_call><function=name><parameter=", "none", "none"),
        ("<tool_call>name<arg_key>", "none", "glm45"),
        ('tools {"name": function name, "parameters": dictionary of', "none", "llama3_json"),
        ("<|python_tag|>", "none", "llama3_json"),
        ("[func_name1(params_name1=", "none", "pythonic"),
    ],
)
def test_the_template_tells_the_formats(template: str, reasoning: str, tools: str) -> None:
    found = choose_chat_format(template, "auto", "auto", {}.get, ())
    by_name = choose_chat_format("", reasoning, tools, {}.get, ())
    assert (found.reasoning, found.tools) == (by_name.reasoning, by_name.tools)


def test_harmony_is_both_or_neither() -> None:
    template = "<|start|>assistant<|channel|>analysis<|message|> to=functions.x"
    for source, reasoning, tools in (
        (template, "auto", "auto"),
        ("", "openai_gptoss", "none"),
        ("", "none", "openai"),
    ):
        found = choose_chat_format(source, reasoning, tools, {}.get, ())
        assert found.reasoning is found.tools is HARMONY


def test_the_settings_name_every_format() -> None:
    assert {*get_args(ReasoningParser)} == {"auto", "none", *REASONING_FORMATS}
    assert {*get_args(ToolCallParser)} == {"auto", "none", *TOOL_FORMATS}


# -- grammars ----------------------------------------------------------------------------------------------------------


def lark(
    reasoning: str = "none",
    tools: str = "hermes",
    prompt: str = "",
    use: ToolUse | None = None,
    grammar: Grammar | None = None,
    budget: int | None = None,
    tokens: dict[str, int] | None = None,
) -> list[str]:
    found = chat_format(reasoning, tools, THINK if tokens is None else tokens).for_answers(prompt, use, grammar, budget)
    assert found.grammar is not None and found.grammar.kind is GrammarKind.COMPOSED
    return found.grammar.text.splitlines()


def test_a_free_answer_has_no_grammar() -> None:
    assert chat_format("qwen3", "hermes").for_answers("", TOOLS, None, None).grammar is None


def test_a_grammar_without_reasoning_before_it_stays_as_it_is() -> None:
    assert chat_format("none", "hermes").for_answers("", None, JSON, None).grammar is JSON
    assert chat_format("qwen3", "hermes").for_answers("<think></think>", None, JSON, None).grammar is JSON


def test_a_grammar_of_the_content_applies_behind_the_reasoning() -> None:
    bounded = "<[^2,8]>{0,5} <[8]> /\\n{0,2}/"
    assert lark("qwen3", grammar=JSON, budget=5) == [f"start: (<[7]> {bounded})? answer", "answer: @part0"]
    assert lark("qwen3", prompt="<think>", grammar=JSON, budget=5)[0] == f"start: {bounded} answer"
    assert lark("qwen3", grammar=JSON)[0] == "start: (<[7]> <[^2,8]>* <[8]> /\\n{0,2}/)? answer"
    assert lark("qwen3", prompt="<think>", grammar=JSON, tokens={}) == [
        "start: reasoning /\\n{0,2}/ answer",
        "reasoning[lazy]: /(?s:.*)<\\/think>/",
        "answer: @part0",
    ]


def test_demanded_calls_follow_their_schemas() -> None:
    found = chat_format("none", "hermes", THINK).for_answers("", DEMANDED, None, None).grammar
    assert found is not None and found.param == "tools"
    call = '(<[9]> "\\n" ("{\\"name\\": \\"add\\", \\"arguments\\": " @part0 "}") "\\n" <[10]>)'
    assert found.text.splitlines() == ["start:  answer", f"answer: {call}"]
    assert found.parts == (Grammar(GrammarKind.JSON_SCHEMA, Function("add").parameters, "the parameters of 'add'"),)


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_what_a_grammar_demands_is_what_the_parser_reads(tools: str) -> None:
    """The symbols of a grammar without choices, joined, are an answer with one call."""
    tokens = HARMONY_TOKENS
    rule = lark(tools=tools, use=DEMANDED, tokens=tokens)[-1].removeprefix("answer: ")
    by_id = {f"<[{token_id}]>": text for text, token_id in tokens.items()}
    text, position, decoder = "", 0, json.JSONDecoder()
    while position < len(rule):
        if rule[position] == '"':
            literal, position = decoder.raw_decode(rule, position)
            text += literal
        elif (symbol := rule[position : rule.find(">", position) + 1]) in by_id:
            text, position = text + by_id[symbol], position + len(symbol)
        elif rule.startswith("@part0", position):
            text, position = text + '{"a": 1}', position + len("@part0")
        else:
            assert rule[position] in " ()"
            position += 1
    wanted = chat_format("none", tools, tokens).for_answers("", DEMANDED, None, None)
    assert parse(wanted, text) == {"calls": [("add", '{"a": 1}')]}


@pytest.mark.parametrize("tools", [name for name in TOOL_FORMATS if name != "openai"])
def test_parallel_calls_are_bounded(tools: str) -> None:
    use = ToolUse((Function("add"), Function("look")), is_demanded=True)
    assert "{0,15}" in lark(tools=tools, use=use)[-1]


def test_mistrals_form_depends_on_the_tokens_of_the_model() -> None:
    assert lark(tools="mistral", use=DEMANDED, tokens={"[TOOL_CALLS]": 5, "[ARGS]": 6})[-1] == (
        'answer: (<[5]> ("add" <[6]> @part0))'
    )


def test_a_model_without_a_form_for_calls_writes_those_of_hermes() -> None:
    assert lark(tools="none", use=DEMANDED, tokens={}) == lark(tools="hermes", use=DEMANDED, tokens={})


def test_a_strict_function_is_held_to_its_schema_even_if_the_model_may_answer_freely() -> None:
    use = ToolUse((Function("add", is_strict=True), Function("look")), is_parallel=False)
    found = chat_format("none", "hermes", THINK).for_answers("", use, None, None).grammar
    assert found is not None and found.text.startswith("start: <[^9]>* ((<[9]> ")
    assert [part.kind for part in found.parts] == [GrammarKind.JSON_SCHEMA, GrammarKind.JSON]


def test_a_strict_call_begins_where_its_marker_is_complete_if_that_is_text() -> None:
    call = '"\\n" ("{\\"name\\": \\"add\\", \\"arguments\\": " @part0 "}") "\\n" "</tool_call>"'
    assert lark("none", "hermes", use=STRICT, tokens={}) == [
        f"start: (( before_calls  {call}) | /(?s:.*)/)",
        "before_calls[lazy]: /(?s:.*)<tool_call>/",
    ]
    reasoning = lark("qwen3", "hermes", use=STRICT, budget=3, tokens={"<think>": 7, "</think>": 8})
    assert reasoning[1:] == ["before_calls[lazy]: /(?s:.*)<tool_call>/"], "the rule is there once, for both its uses"


def test_an_answer_with_a_budget_does_not_begin_with_its_reasonings_marker_unless_that_is_bounded() -> None:
    (rule,) = lark("qwen3", "hermes", use=STRICT, budget=3)
    bounded, without = rule.removeprefix("start: ").split(") | (")
    assert bounded.startswith("(<[7]> <[^2,8]>{0,3} <[8]> <[^9]>* ((<[9]> ")
    assert without.startswith("(<[^7,9]> <[^9]>*)? ((<[9]> ")


@pytest.mark.parametrize(("tools", "trigger"), [("mistral", "[TOOL_CALLS]"), ("deepseek_v3", "<｜tool▁calls▁begin｜>")])
def test_text_before_strict_calls_is_free_up_to_the_marker_of_the_form(tools: str, trigger: str) -> None:
    (rule,) = lark("none", tools, use=STRICT, tokens={trigger: 12})
    assert rule.startswith("start: <[^12]>* (<[12]> ") and rule.endswith(")?") and "@part0" in rule


def test_a_marker_without_an_object_behind_it_is_content() -> None:
    assert parse(answer_format(tools="hermes"), "<tool_call>oh") == {"content": "<tool_call>oh"}


def test_llamas_calls_may_begin_with_its_tag_if_the_model_has_it() -> None:
    rules = lark("none", "llama3_json", use=STRICT, tokens={"<|python_tag|>": 11})
    assert rules[0].startswith("start: (NO_CALL | <[11]>? (")
    assert lark("none", "llama3_json", use=STRICT, tokens={})[0].startswith("start: (NO_CALL | (")
    assert rules[1].startswith("NO_CALL: /(?s:.*)/ & ~/")


def test_strict_is_not_enforced_where_no_grammar_can_tell_optional_calls_from_text() -> None:
    formats = chat_format("qwen3", "pythonic", THINK)
    assert formats.for_answers("", STRICT, None, None).grammar is None, "OpenAI's SDK always sends strict"
    with_budget, without = (formats.for_answers("", each, None, 3).grammar for each in (STRICT, None))
    assert with_budget is not None and with_budget == without
    demanded = ToolUse(STRICT.functions, is_demanded=True)
    found = formats.for_answers("", demanded, None, None).grammar
    assert found is not None and [part.kind for part in found.parts] == [GrammarKind.JSON_SCHEMA]


def test_reasoning_comes_before_text_with_strict_calls() -> None:
    assert lark("qwen3", "hermes", use=STRICT)[0].startswith(
        "start: (<[7]> <[^2,8]>* <[8]> /\\n{0,2}/)? <[^9]>* ((<[9]> "
    )
    found = lark("openai_gptoss", "openai", use=STRICT, budget=3, tokens=HARMONY_TOKENS)[0]
    assert found.startswith('start: (<[21]> "analysis" <[22]> <[^2,23]>{0,3} <[23]> <[20]> "assistant")? ')
    assert found.endswith(
        '(<[21]> "final" <[22]> <[^21]>* | <[21]> ("commentary to=functions.add " <[24]> "json" <[22]> @part0))'
    )


def test_content_with_a_grammar_may_be_a_call_instead() -> None:
    assert lark(use=TOOLS, grammar=JSON)[-1].startswith("answer: @part0 | (<[9]> ")


def test_a_budget_ends_the_reasoning_of_a_free_answer() -> None:
    assert lark("qwen3", budget=3) == ["start: (<[7]> <[^2,8]>{0,3} <[8]> <[*]>*) | ((<[^7]> <[*]>*)?)"]
    assert lark("qwen3", prompt="<think>", budget=0) == ["start:  <[8]> <[*]>*"]
    assert lark("qwen3", prompt="</think>", budget=0) == ["start: <[*]>*"]


def test_harmonys_reasoning_is_bounded_and_followed_by_the_final_channel() -> None:
    analysis = '"analysis" <[22]> <[^2,23]>{0,3} <[23]>'
    assert lark("openai_gptoss", grammar=JSON, budget=3, tokens=HARMONY_TOKENS) == [
        f'start: (<[21]> {analysis} <[20]> "assistant")? answer',
        'answer: <[21]> "final" <[22]> @part0',
    ]
    assert lark("openai_gptoss", budget=3, tokens=HARMONY_TOKENS) == [
        f'start: <[21]> ({analysis} | ("final" | "commentary")) <[*]>*'
    ]


@pytest.mark.parametrize(
    ("reasoning", "tools", "use", "grammar", "budget", "param", "words"),
    [
        ("none", "none", TOOLS, None, None, "tools", "--tool-call-parser"),
        ("none", "none", None, None, 5, "thinking_token_budget", "--reasoning-parser"),
        ("none", "none", None, JSON, 5, "thinking_token_budget", "--reasoning-parser"),
        ("none", "hermes", DEMANDED, JSON, None, "response_format", "tool_choice"),
        ("qwen3", "none", None, None, 5, "thinking_token_budget", "not single tokens"),
        ("qwen3", "none", None, JSON, 5, "thinking_token_budget", "not single tokens"),
        ("openai_gptoss", "none", None, JSON, None, "messages", "<|end|>"),
    ],
)
def test_what_cannot_be_done_is_refused(
    reasoning: str,
    tools: str,
    use: ToolUse | None,
    grammar: Grammar | None,
    budget: int | None,
    param: str,
    words: str,
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat_format(reasoning, tools).for_answers("", use, grammar, budget)
    assert refusal.value.param == param and words in refusal.value.message


def test_events_of_an_answer_are_what_clients_get() -> None:
    text = '<think>Hm</think>Hi <tool_call>{"name": "add"}</tool_call>'
    assert message(events_of(answer_format("qwen3", "hermes"), [text])) == {
        "reasoning": "Hm",
        "content": "Hi",
        "calls": [("add", "{}")],
    }


def test_a_model_reasons_if_its_template_tells_so() -> None:
    for template, reasons in (("<think>", True), ("[THINK]", True), ("{{ messages }}", False)):
        assert choose_chat_format(template, "auto", "auto", {}.get, ()).has_reasoning is reasons
