"""Hold the results of one server: its score of the text, and its answers to the questions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from servekit.evaluation.perplexity import TextScore
from servekit.evaluation.questions import Question
from servekit.evaluation.statistics import Interval, share_interval

ALL = "all questions"


class Answer(Struct):
    """The answer to one question. Of one with choices, the text is the likeliest choice."""

    text: str
    tokens: list[str] | None = None  # if the server returns them


class Measurement(Struct):
    """The results of a server."""

    url: str
    model: str
    text: TextScore | None
    answers: list[Answer]  # in the order of the questions


class CategoryScore(Struct):
    """How many questions of a category are answered right."""

    category: str
    num: int
    num_right: int
    share: Interval


class Summary(Struct):
    """The figures of a server."""

    url: str
    model: str
    num_text_tokens: int
    perplexity: Interval | None
    bits_per_byte: float | None
    categories: list[CategoryScore]  # first all questions together; questions without an answer do not count


def marks(questions: Sequence[Question], measurement: Measurement) -> dict[str, list[bool]]:
    """Return for each category which questions were answered right, in their order; first for all together."""
    found: dict[str, list[bool]] = {ALL: []}
    for question, answer in zip(questions, measurement.answers, strict=True):
        is_right = question.is_right(answer.text)
        if is_right is not None:
            found[ALL].append(is_right)
            found.setdefault(question.category, []).append(is_right)
    return {category: of_category for category, of_category in found.items() if of_category}


def summarise(questions: Sequence[Question], measurement: Measurement) -> Summary:
    """Return the figures of one server."""
    text = measurement.text
    return Summary(
        measurement.url,
        measurement.model,
        0 if text is None else len(text.scores),
        None if text is None else text.perplexity,
        None if text is None else text.bits_per_byte,
        [
            CategoryScore(category, len(right), sum(right), share_interval(sum(right), len(right)))
            for category, right in marks(questions, measurement).items()
        ],
    )
