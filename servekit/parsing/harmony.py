"""Read the format of gpt-oss, in which an answer is a sequence of messages, each in a channel.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>ARGUMENTS<|call|>

The channel `final` is content, and so is `commentary` without a recipient. The prompt ends with `<|start|>assistant`.
`<|call|>` and `<|return|>` end the answer, so it has one call at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from servekit.errors import InvalidRequest
from servekit.parsing.answer_events import AnswerEvents
from servekit.parsing.lark import FreeText, Lark, any_text, literal, one_of
from servekit.parsing.reasoning import Start
from servekit.parsing.text_reader import Malformed, Steps, TextReader
from servekit.parsing.tool_calls import FunctionSymbol

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


@dataclass(frozen=True)
class Harmony:
    """Both a format of reasoning and one of tool calls: neither can be read without the other."""

    call_id_length: int | None = None
    can_be_strict: ClassVar[bool] = True
    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def start_after(self, prompt: str) -> Start:
        return Start.BEFORE_REASONING

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, reader: TextReader, answer: AnswerEvents, start: Start = Start.BEFORE_REASONING) -> Steps[None]:
        """Read all messages."""
        while True:
            marker = yield from reader.until((CHANNEL, START), answer.text)
            if marker is None:
                return
            reader.attempt()
            try:
                header, _ = yield from reader.text_before(MESSAGE)
            except Malformed:  # the answer was cut in a header, which is no text
                reader.accept()
                continue
            reader.accept()
            yield from self._read_message(reader, answer, marker + header)

    def _read_message(self, reader: TextReader, answer: AnswerEvents, header: str) -> Steps[None]:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        pass_on = answer.text
        if recipient is not None and answer.max_calls:
            answer.begin_call(recipient[1].removeprefix("functions."))
            pass_on = answer.arguments
        elif channel is not None and channel[1] == "analysis":
            answer.begin_reasoning()
        else:
            answer.begin_content()
        if (yield from reader.until((END, CALL, RETURN), pass_on)) is not None:
            answer.begin_content()

    # -- grammars -----------------------------------------------------------------------------------------------------

    def before_answer(self, lark: Lark, start: Start, max_tokens: int | None) -> str:
        marker = lark.marker
        text = self._analysis(lark, max_tokens)
        return f"({marker(CHANNEL)} {literal('analysis')} {text} {marker(START)} {literal('assistant')})?"

    def content(self, symbol: str, lark: Lark) -> str:
        return f"{lark.marker(CHANNEL)} {literal('final')} {lark.marker(MESSAGE)} {symbol}"

    def free_answer(self, lark: Lark, start: Start, max_tokens: int | None, text: FreeText) -> str:
        if text is not any_text:
            return f"{self.before_answer(lark, start, max_tokens)} {text(lark)}"
        other = one_of([literal("final"), literal("commentary")])
        first = f"{literal('analysis')} {self._analysis(lark, max_tokens)} | {other}"
        return f"{lark.marker(CHANNEL)} ({first}) {text(lark)}"

    def calls(self, functions: Sequence[FunctionSymbol], lark: Lark, most: int) -> str:
        marker = lark.marker
        kinds = [
            f"{literal(f'commentary to=functions.{each.name} ')} {marker(CONSTRAIN)} {literal('json')} "
            f"{marker(MESSAGE)} {each.arguments}"
            for each in functions
        ]
        return f"{marker(CHANNEL)} {one_of(kinds)}"

    def free_text(self, functions: Sequence[FunctionSymbol], most: int, lark: Lark, not_first: str = "") -> str:
        """Return what matches messages in `commentary`, and after them the final message, or one of these calls."""
        marker = lark.marker
        text = f"{marker(MESSAGE)} {lark.running_text(END, None)} {marker(END)}"
        before = f"({marker(CHANNEL)} {literal('commentary')} {text} {marker(START)} {literal('assistant')})*"
        final = f"{marker(CHANNEL)} {literal('final')} {marker(MESSAGE)} {lark.any_but(CHANNEL)}*"
        return f"{before} ({final} | {self.calls(functions, lark, most)})"

    def _analysis(self, lark: Lark, max_tokens: int | None) -> str:
        if not lark.has_token(END):
            raise InvalidRequest(
                f"{END} is not a token of this model, so that no grammar can follow its reasoning; leave tool_choice, "
                "response_format and thinking_token_budget out",
                param="messages",
            )
        return f"{lark.marker(MESSAGE)} {lark.running_text(END, max_tokens)} {lark.marker(END)}"
