"""Read questions with the answers that count as right from a file of JSON lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from servekit.errors import ConfigError
from servekit.evaluation.json_lines import decode_lines

T = TypeVar("T")
Text = Annotated[str, Meta(min_length=1)]


class Message(Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Text
    content: str


class Question(Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of a file of questions. Either `prompt` or `messages` is set."""

    prompt: Text | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    answer: Text | list[Text] | None = None  # without one, only the answers of two servers are compared
    category: Text = "questions"
    score: Literal["exact", "contains", "regex", "choice"] | None = None  # None: choice with `choices`, else exact
    choices: Annotated[list[Text], Meta(min_length=2)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 128

    @property
    def is_choice(self) -> bool:
        return self.choices is not None

    @property
    def accepted(self) -> list[str]:
        """The answers of which each is right; empty if the question is not scored."""
        if self.answer is None:
            return []
        return [self.answer] if isinstance(self.answer, str) else self.answer

    def is_right(self, text: str) -> bool | None:
        """Return whether the model's text is a right answer; None if the question has no answer."""
        if not self.accepted:
            return None
        match self.score:
            case "contains":
                return any(answer.lower() in text.lower() for answer in self.accepted)
            case "regex":
                return any(re.search(pattern, text) for pattern in self.accepted)
            case _:
                return text.strip() in [answer.strip() for answer in self.accepted]

    def problem(self) -> str | None:
        """Return what is wrong with the question, or None."""
        if (self.prompt is None) == (self.messages is None):
            return "it needs either prompt or messages"
        if self.score == "choice" and self.choices is None:
            return 'score "choice" needs choices'
        if self.choices is not None:
            if self.score not in (None, "choice"):
                return f'choices are scored by their probability; leave out score "{self.score}"'
            if self.prompt is None:
                return "choices need a prompt: they are scored as its continuation, not as a message"
            if not set(self.accepted) <= set(self.choices) or not self.accepted:
                return "the answer must be one of the choices"
        if self.score == "regex":
            for pattern in self.accepted:
                try:
                    re.compile(pattern)
                except re.error as error:
                    return f"the answer {pattern!r} is not a regular expression: {error}"
        return None


def parse_questions(content: bytes, name: str) -> list[Question]:
    """Return the questions of a file's content. Raises ConfigError with the line."""
    questions = []
    for place, question in decode_lines(content, Question, name):
        if problem := question.problem():
            raise ConfigError(f"{place}: {problem}")
        questions.append(question)
    if not questions:
        raise ConfigError(f"{name} has no questions; it needs a JSON object on each line")
    return questions


def as_chats(questions: Iterable[Question]) -> list[Question]:
    """Return the questions with each prompt as a message, except those with choices."""
    return [
        question
        if question.prompt is None or question.is_choice
        else msgspec.structs.replace(question, prompt=None, messages=[Message("user", question.prompt)])
        for question in questions
    ]


def evenly(items: list[T], limit: int | None) -> list[T]:
    """Return at most `limit` items, at even distances, so that each category keeps its share."""
    if limit is None or len(items) <= limit:
        return items
    return [items[len(items) * number // limit] for number in range(limit)]
