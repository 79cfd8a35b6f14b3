"""Read reasoning between two tags, before the answer: `<think>` of DeepSeek-R1 and Qwen3, `[THINK]` of Mistral.

Some chat templates write the opening tag at the end of the prompt, so that the answer begins inside the reasoning.
Others write both tags there, if the client wants no reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from servekit.errors import InvalidRequest
from servekit.parsing.answer_events import AnswerEvents
from servekit.parsing.lark import FreeText, Lark, regular_expression
from servekit.parsing.text_reader import Steps, TextReader

BLANK_LINES = r"/\n{0,2}/"  # after the closing tag
TAIL_CHARACTERS = 256  # of the prompt, in which a tag is looked for


class Start(Enum):
    """Where an answer begins, as its prompt ends."""

    BEFORE_REASONING = "before"  # if the model wants to reason
    IN_REASONING = "in"
    AFTER_REASONING = "after"


class ReasoningFormat(Protocol):
    """How a family of models writes its reasoning, and what follows it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must stay in the answer's text, because the parser needs them."""

    def start_after(self, prompt: str) -> Start:
        """Return where the answer to this prompt begins."""

    def read(self, reader: TextReader, answer: AnswerEvents, start: Start) -> Steps[None]:
        """Read the reasoning, if there is any."""

    def before_answer(self, lark: Lark, start: Start, max_tokens: int | None) -> str:
        """Return what matches the reasoning before an answer that has a grammar. `max_tokens` bounds it.

        Raises InvalidRequest if it cannot be bounded.
        """

    def content(self, symbol: str, lark: Lark) -> str:
        """Return what matches content, given the symbol that matches its text."""

    def free_answer(self, lark: Lark, start: Start, max_tokens: int | None, text: FreeText) -> str:
        """Return what matches an answer of reasoning and `text`. `max_tokens` bounds the reasoning.

        Raises InvalidRequest if it cannot be bounded.
        """


@dataclass(frozen=True)
class NoReasoning:
    """The model does not reason, or its reasoning is not separated."""

    markers: tuple[str, ...] = ()

    def start_after(self, prompt: str) -> Start:
        return Start.AFTER_REASONING

    def read(self, reader: TextReader, answer: AnswerEvents, start: Start) -> Steps[None]:
        yield from ()

    def before_answer(self, lark: Lark, start: Start, max_tokens: int | None) -> str:
        if max_tokens is not None:
            raise self._refusal(max_tokens)
        return ""

    def content(self, symbol: str, lark: Lark) -> str:
        return symbol

    def free_answer(self, lark: Lark, start: Start, max_tokens: int | None, text: FreeText) -> str:
        if max_tokens is not None:
            raise self._refusal(max_tokens)
        return text(lark)

    def _refusal(self, max_tokens: int) -> InvalidRequest:
        return InvalidRequest(
            f"thinking_token_budget = {max_tokens}: this model's chat template has no form for reasoning that this "
            "server knows; leave it out, or start the server with --reasoning-parser",
            param="thinking_token_budget",
        )


@dataclass(frozen=True)
class ThinkingTags:
    """Reasoning between two tags. `always_begins`: the model reasons without the opening tag, too."""

    opening: str
    closing: str
    always_begins: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def start_after(self, prompt: str) -> Start:
        tail = prompt[-TAIL_CHARACTERS:].rstrip()
        if tail.endswith(self.closing):
            return Start.AFTER_REASONING
        return Start.IN_REASONING if self.always_begins or tail.endswith(self.opening) else Start.BEFORE_REASONING

    def read(self, reader: TextReader, answer: AnswerEvents, start: Start) -> Steps[None]:
        if start is Start.AFTER_REASONING:
            return
        if start is Start.IN_REASONING:
            answer.begin_reasoning()
        reader.attempt()
        yield from reader.skip_whitespace()
        if (yield from reader.reads(self.opening)) is not None:
            reader.accept()
            answer.begin_reasoning()
        else:
            reader.reject()
        if answer.is_reasoning and (yield from reader.until((self.closing,), answer.text)) is not None:
            answer.begin_content()

    def before_answer(self, lark: Lark, start: Start, max_tokens: int | None) -> str:
        if start is Start.AFTER_REASONING:
            return ""
        if lark.has_token(self.closing):
            rest = f"{lark.running_text(self.closing, max_tokens)} {lark.marker(self.closing)} {BLANK_LINES}"
        elif max_tokens is None:
            rest = f"reasoning {BLANK_LINES}"
            lark.rules.append(f"reasoning[lazy]: /(?s:.*){regular_expression(self.closing)}/")
        else:
            raise self._cannot_bound()
        return rest if start is Start.IN_REASONING else f"({lark.marker(self.opening)} {rest})?"

    def content(self, symbol: str, lark: Lark) -> str:
        return symbol

    def free_answer(self, lark: Lark, start: Start, max_tokens: int | None, text: FreeText) -> str:
        if start is Start.AFTER_REASONING:
            return text(lark)
        if max_tokens is None:
            return f"{self.before_answer(lark, start, None)} {text(lark)}"
        if not (lark.has_token(self.opening) and lark.has_token(self.closing)):
            raise self._cannot_bound()
        bounded = f"{lark.running_text(self.closing, max_tokens)} {lark.marker(self.closing)} {text(lark)}"
        if start is Start.IN_REASONING:
            return bounded
        # An answer without reasoning must not begin with the tag. Otherwise it could contain reasoning of any length.
        return f"({lark.marker(self.opening)} {bounded}) | ({text(lark, self.opening)})"

    def _cannot_bound(self) -> InvalidRequest:
        return InvalidRequest(
            f"thinking_token_budget: {self.opening} and {self.closing} are not single tokens of this model, so its "
            "reasoning cannot be bounded; leave it out, and set max_tokens",
            param="thinking_token_budget",
        )
