"""Choose the format of the model's reasoning and tool calls, by its chat template or by name.

template, settings ─▶ ChatFormat ─▶ for each request an AnswerFormat: its grammar, and parsers of its answers
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from servekit.errors import InvalidRequest
from servekit.parsing.answer_events import AnswerEvent, AnswerEvents
from servekit.parsing.harmony import Harmony
from servekit.parsing.lark import FreeText, Lark, TokenId, any_text
from servekit.parsing.reasoning import NoReasoning, ReasoningFormat, Start, ThinkingTags
from servekit.parsing.text_reader import Steps, TextReader
from servekit.parsing.tool_calls import (
    MAX_DEMANDED_CALLS,
    DeepSeekCalls,
    FunctionSymbol,
    HermesCalls,
    LlamaCalls,
    MistralCalls,
    ToolFormat,
)
from servekit.parsing.xml_calls import GlmCalls, QwenCoderCalls
from servekit.requests.generation import Grammar, GrammarKind

HARMONY = Harmony()
# vLLM's names, which people have in their scripts.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ThinkingTags("<think>", "</think>", always_begins=True),
    "mistral": ThinkingTags("[THINK]", "[/THINK]"),
    "openai_gptoss": HARMONY,
    "qwen3": ThinkingTags("<think>", "</think>"),
}
TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": DeepSeekCalls(),
    "deepseek_v31": DeepSeekCalls(has_fences=False),
    "glm45": GlmCalls(),
    "hermes": HermesCalls(),
    "llama3_json": LlamaCalls(),
    "mistral": MistralCalls(),
    "openai": HARMONY,
    "pythonic": LlamaCalls(is_pythonic=True),
    "qwen3_coder": QwenCoderCalls(),
}
MAX_CALLS = 128  # of one answer; further ones are left out


# -- what a request wants ----------------------------------------------------------------------------------------------


class Function(Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: str = '{"type": "object", "properties": {}, "additionalProperties": false}'  # its JSON schema
    is_strict: bool = False  # whether arguments must match the schema even if the model calls by its own choice


class ToolUse(Struct, frozen=True):
    """Which functions an answer may call."""

    functions: tuple[Function, ...]
    is_demanded: bool = False  # the answer must be calls
    is_parallel: bool = True  # it may be several

    @property
    def has_strict(self) -> bool:
        """Whether a function's arguments must match its schema even if the model calls by its own choice."""
        return any(function.is_strict for function in self.functions)


# -- what is made of it ------------------------------------------------------------------------------------------------


class AnswerParser:
    """Reads one answer while it arrives. The events do not depend on the pieces in which it arrives."""

    def __init__(self, reasoning: ReasoningFormat, tools: ToolFormat | None, start: Start, use: ToolUse | None) -> None:
        functions = () if use is None else use.functions
        most = 0 if use is None else MAX_CALLS if use.is_parallel else 1
        is_strict = any(function.is_strict for function in functions)
        self._reader = TextReader()
        self._events = AnswerEvents(most, {each.name: each.parameters for each in functions}, is_strict)
        self._steps = self._read(reasoning, tools, start)
        next(self._steps)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        return self._events.is_reasoning

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the events that this text completes."""
        self._reader.add(text)
        next(self._steps)
        return self._events.take()

    def finish(self) -> list[AnswerEvent]:
        """The answer has ended: return the events that are still held back. Call it once."""
        self._reader.complete()
        next(self._steps, None)
        self._events.finish()
        return self._events.take()

    def _read(self, reasoning: ReasoningFormat, tools: ToolFormat | None, start: Start) -> Steps[None]:
        yield from reasoning.read(self._reader, self._events, start)
        if tools is not None:
            yield from tools.read(self._reader, self._events)
        yield from self._reader.until((), self._events.text)


class AnswerFormat(Struct, frozen=True):
    """What the answers to one request look like."""

    reasoning: ReasoningFormat
    tools: ToolFormat | None
    start: Start
    use: ToolUse | None
    grammar: Grammar | None

    @property
    def has_reasoning(self) -> bool:
        return not isinstance(self.reasoning, NoReasoning)

    @property
    def is_parsed(self) -> bool:
        """Whether answers have more than content."""
        return self.has_reasoning or self.tools is not None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must stay in the answers' text, even if they are special tokens."""
        return self.reasoning.markers + (() if self.tools is None else self.tools.markers)

    @property
    def call_id_length(self) -> int | None:
        return None if self.tools is None else self.tools.call_id_length

    def make_parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(self.reasoning, self.tools, self.start, self.use)


class ParsedAnswerFormat(AnswerFormat, frozen=True):
    """Answers that arrive as events, because the server that computes them has parsed them."""

    @property
    def has_reasoning(self) -> bool:
        return True

    @property
    def is_parsed(self) -> bool:
        return True


PARSED_ANSWERS = ParsedAnswerFormat(NoReasoning(), None, Start.AFTER_REASONING, None, None)


class ChatFormat:
    """The formats of one model. `tools` is None if its template does not tell."""

    def __init__(
        self, reasoning: ReasoningFormat, tools: ToolFormat | None, token_id: TokenId, eos_token_ids: Sequence[int]
    ) -> None:
        self.reasoning = reasoning
        self.tools = tools
        self._token_id = token_id
        self._eos_token_ids = eos_token_ids

    @property
    def has_reasoning(self) -> bool:
        return not isinstance(self.reasoning, NoReasoning)

    def check_tools(self, use: ToolUse | None) -> None:
        """Raise InvalidRequest if the model cannot choose by itself to call a function. `for_answers` does so, too."""
        if use is not None and not use.is_demanded and self.tools is None:
            raise InvalidRequest(
                "tools: this model's chat template has no form for tool calls that this server knows, so it cannot "
                "call them by its own choice; send tool_choice 'required' or a function's name, which a grammar "
                "enforces, or start the server with --tool-call-parser",
                param="tools",
            )

    def for_answers(
        self, prompt: str, use: ToolUse | None, grammar: Grammar | None, max_reasoning_tokens: int | None
    ) -> AnswerFormat:
        """Return the format of the answers to a prompt. `grammar` is that of the content. Raises InvalidRequest."""
        self.check_tools(use)
        tools = None if use is None else self.tools or TOOL_FORMATS["hermes"]
        start = self.reasoning.start_after(prompt)
        composed = self._compose(start, tools, use, grammar, max_reasoning_tokens)
        return AnswerFormat(self.reasoning, tools, start, use, composed)

    def _compose(
        self,
        start: Start,
        tools: ToolFormat | None,
        use: ToolUse | None,
        grammar: Grammar | None,
        max_reasoning_tokens: int | None,
    ) -> Grammar | None:
        """Return the grammar of a whole answer: reasoning, then content or calls."""
        is_demanded = use is not None and use.is_demanded
        if grammar is not None and is_demanded:
            raise InvalidRequest(
                f"tool_choice demands a tool call, and {grammar.param} a form of the content; send one of them",
                param=grammar.param,
            )
        lark = Lark(self._token_id, self._eos_token_ids)
        answers: list[str] = []
        free_text: FreeText = any_text
        param = "thinking_token_budget"
        if grammar is not None:
            param = grammar.param
            answers.append(self.reasoning.content(lark.part(replace(grammar, param="")), lark))
        # Where no grammar can hold them, strict functions are as others: OpenAI's SDK marks all of them as strict.
        is_strict = tools is not None and tools.can_be_strict and use is not None and use.has_strict
        if use is not None and tools is not None and (is_demanded or grammar is not None or is_strict):
            functions, most = self._symbols(use, lark), MAX_DEMANDED_CALLS if use.is_parallel else 1
            answers.append(tools.calls(functions, lark, most))
            if tools.can_be_strict:
                free_text = partial(tools.free_text, functions, most)
            param = "tools" if grammar is None else param
        if grammar is not None or is_demanded:
            before = self.reasoning.before_answer(lark, start, max_reasoning_tokens)
            if grammar is not None and not before and len(answers) == 1:
                return grammar
            rule = f"start: {before} answer"
            lark.rules.append("answer: " + " | ".join(answers))
        elif max_reasoning_tokens is not None or free_text is not any_text:
            rule = "start: " + self.reasoning.free_answer(lark, start, max_reasoning_tokens, free_text)
        else:
            return None
        return Grammar(GrammarKind.COMPOSED, "\n".join([rule, *lark.rules, ""]), param, tuple(lark.parts))

    def _symbols(self, use: ToolUse, lark: Lark) -> list[FunctionSymbol]:
        """Return what matches arguments. They match the schema of a function that is strict, or demanded."""
        symbols = []
        for function in use.functions:
            is_strict = use.is_demanded or function.is_strict
            kind, text = (GrammarKind.JSON_SCHEMA, function.parameters) if is_strict else (GrammarKind.JSON, "")
            part = Grammar(kind, text, f"the parameters of {function.name!r}")
            symbols.append(FunctionSymbol(function.name, lark.part(part)))
        return symbols


# -- which formats a model has -----------------------------------------------------------------------------------------


def choose_chat_format(
    template: str, reasoning: str, tools: str, token_id: TokenId, eos_token_ids: Sequence[int]
) -> ChatFormat:
    """Return the formats with these names, or those that the template tells for the name `auto`."""
    reasoning = _reasoning_of(template) if reasoning == "auto" else reasoning
    tools = _tools_of(template) if tools == "auto" else tools
    if reasoning == "openai_gptoss" or tools == "openai":
        return ChatFormat(HARMONY, HARMONY, token_id, eos_token_ids)
    return ChatFormat(REASONING_FORMATS.get(reasoning, NoReasoning()), TOOL_FORMATS.get(tools), token_id, eos_token_ids)


def _reasoning_of(template: str) -> str:
    if "<|channel|>analysis" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    return "qwen3" if "<think>" in template or "</think>" in template else "none"


def _tools_of(template: str) -> str:
    """Return the format that the template shows, or describes to the model."""
    if "<|channel|>" in template and "functions." in template:
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "glm45" if "<arg_key>" in template else "hermes"
    if "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or ('"parameters": dictionary' in template and "tools" in template):
        return "llama3_json"
    return "none"
