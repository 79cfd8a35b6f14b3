"""Questions about the facts: the wordings filled in, properly or as a person in a hurry types."""

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from facts import Exchange
from wordings import EXCHANGES, WORDINGS, Wording


class Question(NamedTuple):
    """One prompt with the one answer that counts as right."""

    category: str
    prompt: str
    answer: str


IRREGULAR_PLURALS = {
    "sheep": "sheep",
    "fish": "fish",
    "deer": "deer",
    "mouse": "mice",
    "goose": "geese",
    "wolf": "wolves",
    "fox": "foxes",
    "fly": "flies",
    "butterfly": "butterflies",
    "person": "people",
}
OPENERS: tuple[str, ...] = (
    "Please tell me: ",
    "Hi! ",
    "Hello, ",
    "Quick question: ",
    "I have a question. ",
    "Tell me, ",
)
ARTICLES = re.compile(r"\b(the|a|an) ", re.IGNORECASE)


def _many(noun: str) -> str:
    return IRREGULAR_PLURALS.get(noun, noun + "s")


def capitalized(text: str) -> str:
    """The text with its first letter in upper case and the rest as it was."""
    return text[:1].upper() + text[1:]


def fields(key: str, value: str) -> dict[str, str]:
    """What the patterns of a `Wording` may mention, for one table row."""
    bare = key.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    return {
        "key": key,
        "Key": capitalized(key),
        "bare": bare,
        "many": _many(bare),
        "value": value,
    }


def _from_wording(category: str, wording: Wording, held_out: bool) -> Iterator[list[Question]]:
    for key, value in wording.rows.items():
        row = fields(key, value)
        answer = wording.answer.format(**row)
        patterns = wording.held_out if held_out else wording.trained()
        prompts = (capitalized(pattern.format(**row)) for pattern in patterns)
        yield [Question(category, prompt, answer) for prompt in prompts]


def _from_exchange(category: str, exchange: Exchange, held_out: bool) -> list[Question]:
    prompts = exchange.held_out if held_out else exchange.trained
    return [Question(category, prompt, exchange.answer) for prompt in prompts]


def question_groups(category: str, *, held_out: bool) -> list[list[Question]]:
    """The questions of one category, grouped by the fact that answers them."""
    groups = [group for wording in WORDINGS.get(category, ()) for group in _from_wording(category, wording, held_out)]
    groups += [_from_exchange(category, exchange, held_out) for exchange in EXCHANGES.get(category, ())]
    return groups


def casual(prompt: str, rng: random.Random) -> str:
    """The prompt as a person in a hurry may type it: with an opener, or less than correct."""
    if rng.random() < 0.1:
        prompt = rng.choice(OPENERS) + prompt
    if rng.random() < 0.15:
        prompt = capitalized(ARTICLES.sub("", prompt))
    if rng.random() < 0.4:
        prompt = prompt.replace("color", "colour")
    if rng.random() < 0.25:
        prompt = prompt.lower()
    if rng.random() < 0.25:
        prompt = prompt.rstrip("?.!")
    return prompt
