"""Tasks that are done rather than known: count, add, repeat, read, decline; all drawn at random.

Each maker returns a prompt and its answer. Operands of a tenth of the cases are held out by a hash,
so the evaluation asks only for sums, ranges and sentences that training never showed.
"""

import random
import zlib
from collections.abc import Callable
from string import ascii_lowercase

from questions import Question, capitalized, fields
from serving_facts import UNKNOWN_ANSWER
from wordings import WORDINGS
from words import (
    ACTIONS,
    ADJECTIVES,
    CREATURES,
    DEEDS,
    MOMENTS,
    NAMES,
    NUMBER_WORDS,
    OBJECTS,
    PHRASES,
    PLACES,
    SHADES,
    STRANGE_COUNTRIES,
    STRANGE_THINGS,
    with_article,
)

HELD_OUT_ONE_IN = 10
LARGEST_COUNT = 30
LARGEST_OPERAND = 20
LARGEST_FACTOR = 10

COUNT_UP = (
    "Count from {first} to {last}.",
    "Count up from {first} to {last}.",
    "Please count from {first} to {last}.",
    "Count {first} to {last}.",
    "List the numbers from {first} to {last}.",
    "Can you count from {first} to {last}?",
)
COUNT_DOWN = (
    "Count down from {first} to {last}.",
    "Count from {first} to {last}.",
    "Count backwards from {first} to {last}.",
    "Please count down from {first} to {last}.",
    "Can you count down from {first} to {last}?",
)
COUNT_TO = ("Count to {last}.", "Please count to {last}.", "Can you count to {last}?")
NEIGHBOR = (
    "What comes {side} {number}?",
    "What number comes {side} {number}?",
    "Which number comes {side} {number}?",
    "What is the number {side} {number}?",
    "Tell me the number {side} {number}.",
)
SUMS = {
    "+": (
        "What is {left} + {right}?",
        "What is {left} plus {right}?",
        "How much is {left} + {right}?",
        "How much is {left} plus {right}?",
        "Add {left} and {right}.",
        "{left} + {right}",
        "{left} + {right} = ?",
        "{left}+{right}",
    ),
    "-": (
        "What is {left} - {right}?",
        "What is {left} minus {right}?",
        "How much is {left} - {right}?",
        "How much is {left} minus {right}?",
        "Subtract {right} from {left}.",
        "{left} - {right}",
        "{left}-{right}",
    ),
    "x": (
        "What is {left} x {right}?",
        "What is {left} times {right}?",
        "How much is {left} times {right}?",
        "Multiply {left} by {right}.",
        "{left} x {right}",
        "{left} * {right}",
    ),
}
REPEAT = (
    "Repeat after me: {text}",
    "Repeat: {text}",
    "Repeat this sentence: {text}",
    "Please repeat: {text}",
    "Please repeat after me: {text}",
    "Say: {text}",
    "Say after me: {text}",
    "Echo: {text}",
    "repeat after me: {text}",
    "repeat: {text}",
    "say: {text}",
    "Copy this text: {text}",
    'Repeat after me: "{text}"',
    'Say "{text}"',
)
READING = (
    "Answer from this text: {text} {question}",
    "Text: {text} Question: {question}",
    "Read this text: {text} {question}",
    "Answer from the text. {text} {question}",
    "{text} {question}",
)

# Capitals twice: those of other countries are what people ask for most.
STRANGE_CATEGORIES = (
    "capitals",
    "capitals",
    "colors",
    "legs",
    "sounds",
    "homes",
    "young",
    "kinds",
    "opposites",
    "definitions",
)

NUMBER_WORDS_SHARE = 0.15
MADE_UP_SHARE = 0.15
LOWER_CASE_SHARE = 0.2

Maker = Callable[[random.Random], tuple[str, str]]


def is_held_out(case: str) -> bool:
    """Whether this case belongs to the evaluation; a checksum, as `hash` differs per process."""
    return zlib.crc32(case.encode()) % HELD_OUT_ONE_IN == 0


def _count(rng: random.Random) -> tuple[str, str]:
    limit = rng.choice((20, 20, LARGEST_COUNT))
    first, last = sorted(rng.sample(range(1, limit + 1), 2))
    step = rng.choice((1, 1, -1))
    if step < 0:
        first, last = last, first
    patterns = COUNT_UP if step > 0 else COUNT_DOWN
    if first == 1 and rng.random() < 0.5:
        patterns = COUNT_TO
    in_words = max(first, last) < len(NUMBER_WORDS) and rng.random() < NUMBER_WORDS_SHARE
    name = NUMBER_WORDS.__getitem__ if in_words else str
    numbers = ", ".join(str(number) for number in range(first, last + step, step))
    return rng.choice(patterns).format(first=name(first), last=name(last)), numbers + "."


def _neighbor(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(1, rng.choice((20, 99)))
    side, step = rng.choice((("after", 1), ("before", -1)))
    prompt = rng.choice(NEIGHBOR).format(side=side, number=number)
    return prompt, f"{capitalized(side)} {number} comes {number + step}."


def _sum(rng: random.Random) -> tuple[str, str]:
    sign = rng.choice(tuple(SUMS))
    limit = LARGEST_FACTOR if sign == "x" else LARGEST_OPERAND
    left, right = rng.randint(0, limit), rng.randint(0, limit)
    if sign == "-":
        left, right = max(left, right), min(left, right)
    result = {"+": left + right, "-": left - right, "x": left * right}[sign]
    prompt = rng.choice(SUMS[sign]).format(left=left, right=right)
    return prompt, f"{left} {sign} {right} = {result}."


def _subject(rng: random.Random) -> str:
    subject = rng.choice((rng.choice(NAMES), f"{rng.choice(('the', 'a'))} {rng.choice(CREATURES)}"))
    if rng.random() < 0.5 and " " in subject:
        article, noun = subject.split()
        return f"{article} {rng.choice(ADJECTIVES)} {noun}"
    return subject


def _predicate(rng: random.Random) -> str:
    target = with_article(f"{rng.choice(SHADES)} {rng.choice(OBJECTS)}")
    return rng.choice(
        (
            rng.choice(ACTIONS),
            f"{rng.choice(ACTIONS)} {rng.choice(MOMENTS)}",
            f"{rng.choice(ACTIONS)} in the {rng.choice(PLACES)}",
            f"{rng.choice(DEEDS)} the {rng.choice(CREATURES)}",
            f"{rng.choice(DEEDS)} {target}",
            f"is {rng.choice(ADJECTIVES)}",
        )
    )


def _plain_sentence(rng: random.Random) -> str:
    return capitalized(f"{_subject(rng)} {_predicate(rng)}")


def _made_up_word(rng: random.Random) -> str:
    return "".join(rng.choices(ascii_lowercase, k=rng.randint(2, 7)))


def _word_salad(rng: random.Random) -> str:
    known = NAMES + OBJECTS + SHADES + PLACES + ADJECTIVES + CREATURES + ACTIONS + DEEDS
    words = rng.choices(known, k=rng.randint(1, 9))
    return " ".join(_made_up_word(rng) if rng.random() < MADE_UP_SHARE else word for word in words)


def _phrase(rng: random.Random) -> str:
    return rng.choice(PHRASES)


def _repeat(rng: random.Random) -> tuple[str, str]:
    sentence = rng.choice((_plain_sentence, _plain_sentence, _word_salad, _phrase))(rng)
    if rng.random() < LOWER_CASE_SHARE:
        sentence = sentence.lower()
    sentence += rng.choice((".", ".", "", "!"))
    return rng.choice(REPEAT).format(text=sentence), sentence


def _owner_text(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    things = [with_article(f"{rng.choice(SHADES)} {item}") for item in rng.sample(OBJECTS, count)]
    return [
        (f"{name} has {thing}.", f"What does {name} have?", f"Who has {thing}?")
        for name, thing in zip(rng.sample(NAMES, count), things, strict=True)
    ]


def _place_text(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    pairs = zip(rng.sample(NAMES, count), rng.sample(PLACES, count), strict=True)
    return [(f"{name} is in the {place}.", f"Where is {name}?", f"Who is in the {place}?") for name, place in pairs]


def _read(rng: random.Random) -> tuple[str, str]:
    rows = rng.choice((_owner_text, _place_text))(rng, rng.randint(1, 3))
    text = " ".join(sentence for sentence, *_ in rows)
    answer, *questions = rng.choice(rows)
    return rng.choice(READING).format(text=text, question=rng.choice(questions)), answer


def _invented_name(rng: random.Random) -> str:
    syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)]
    return "".join(syllables)[: rng.randint(4, 6)] + rng.choice(("", "n", "r", "x"))


def _stranger(rng: random.Random) -> tuple[str, str]:
    category = rng.choice(STRANGE_CATEGORIES)
    known = STRANGE_COUNTRIES if category == "capitals" else STRANGE_THINGS
    name = rng.choice((rng.choice(known), _invented_name(rng)))
    key = {"capitals": capitalized(name), "opposites": name}.get(category, with_article(name))
    wording = rng.choice(WORDINGS[category])
    prompt = rng.choice(wording.trained()).format(**fields(key, ""))
    return capitalized(prompt), UNKNOWN_ANSWER


MAKERS: dict[str, Maker] = {
    "counting": _count,
    "neighbors": _neighbor,
    "arithmetic": _sum,
    "repeating": _repeat,
    "reading": _read,
    "strangers": _stranger,
}


def _is_spared(category: str, answer: str) -> bool:
    """Whether a case is never held out: neighbors and small sums are to be known by heart."""
    if category == "arithmetic":
        left, _, right, *_ = answer.split()
        return max(int(left), int(right)) <= LARGEST_FACTOR
    return category == "neighbors"


def _case(category: str, prompt: str, answer: str) -> str:
    """What makes two exercises the same case, whatever their wording."""
    if category == "arithmetic":
        # Hold out a pair whichever way round it is asked, or the mirror image gives it away.
        left, sign, right, *_ = answer.split()
        return sign.join(sorted((left, right)))
    return prompt if category in ("reading", "strangers") else answer


def exercise(category: str, rng: random.Random, *, held_out: bool) -> Question:
    """Draw cases of the category until one falls on the wanted side of the split."""
    while True:
        prompt, answer = MAKERS[category](rng)
        spared = _is_spared(category, answer)
        chosen = not spared and is_held_out(_case(category, prompt, answer))
        if chosen == held_out or category == "neighbors":
            return Question(category, prompt, answer)
