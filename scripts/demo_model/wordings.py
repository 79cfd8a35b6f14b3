"""The wordings of every question: those trained on, and those held back for the evaluation.

Every wording of a question has the same answer, letter for letter, so an evaluation can compare
whole answers instead of searching them for a keyword.
"""

from typing import NamedTuple

from facts import (
    CALENDAR,
    CAPITALS,
    COLORS,
    DAYS,
    HOMES,
    KINDS,
    LEGS,
    MONTH_LENGTHS,
    OPPOSITES,
    ORDINALS,
    PLURALS,
    SOUNDS,
    YOUNG,
    Exchange,
)
from serving_facts import (
    DEFINITIONS,
    IDENTITY,
    SERVEKIT,
    UNKNOWN_ANSWER,
    UNKNOWN_HELD_OUT,
    UNKNOWN_TRAINED,
)


class Wording(NamedTuple):
    """How a table row is asked about: patterns over `{key}`, `{bare}`, `{many}` and `{value}`.

    Nouns and clauses are what may be asked for: `the color of {key}`, `what color {key} is`. Each
    is put into every frame, and what comes out is trained on unless it is held out.
    """

    rows: dict[str, str]
    answer: str
    questions: tuple[str, ...]
    nouns: tuple[str, ...]
    clauses: tuple[str, ...]
    held_out: tuple[str, ...]

    def trained(self) -> tuple[str, ...]:
        """Every pattern to train on."""
        framed = [frame.format(noun) for frame in NOUN_FRAMES for noun in self.nouns]
        framed += [frame.format(clause) for frame in CLAUSE_FRAMES for clause in self.clauses]
        patterns = dict.fromkeys((*self.questions, *framed))
        return tuple(pattern for pattern in patterns if pattern not in self.held_out)


NOUN_FRAMES = (
    "What is {}?",
    "What's {}?",
    "Tell me {}.",
    "Name {}.",
    "Give me {}.",
    "Do you know {}?",
    "Can you tell me {}?",
    "I want to know {}.",
    "What do you know about {}?",
    "{}?",
)
CLAUSE_FRAMES = (
    "Tell me {}.",
    "Do you know {}?",
    "Can you tell me {}?",
    "Please tell me {}.",
    "I want to know {}.",
    "Could you say {}?",
    "I wonder {}.",
)


def _both_ways(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return dict(pairs) | {second: first for first, second in pairs}


def _successors(names: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(names, names[1:] + names[:1], strict=True))


def _predecessors(names: tuple[str, ...]) -> dict[str, str]:
    return {after: before for before, after in _successors(names).items()}


MONTHS = tuple(MONTH_LENGTHS)

WORDINGS: dict[str, tuple[Wording, ...]] = {
    "capitals": (
        Wording(
            CAPITALS,
            "The capital of {key} is {value}.",
            (
                "Which city is the capital of {key}?",
                "What city is the capital of {key}?",
                "The capital of {key} is what?",
                "Which is the capital of {key}?",
            ),
            (
                "the capital of {key}",
                "the capital city of {key}",
                "{key}'s capital",
            ),
            (
                "what the capital of {key} is",
                "which city is the capital of {key}",
                "what the capital city of {key} is",
            ),
            (
                "Can you name the capital of {key}?",
                "Which city is the capital city of {key}?",
                "Tell me what the capital of {key} is.",
            ),
        ),
    ),
    "colors": (
        Wording(
            COLORS,
            "{Key} is {value}.",
            (
                "What color is {key}?",
                "Which color is {key}?",
                "What color does {key} have?",
                "{Key} is what color?",
            ),
            ("the color of {key}", "{key}'s color"),
            (
                "what color {key} is",
                "which color {key} is",
                "what color {key} has",
                "what the color of {key} is",
            ),
            (
                "Which color does {key} have?",
                "Tell me what color {key} is.",
                "What's the color of {key}?",
            ),
        ),
    ),
    "legs": (
        Wording(
            LEGS,
            "{Key} has {value} legs.",
            (
                "How many legs does {key} have?",
                "How many legs do {many} have?",
                "How many legs has {key}?",
                "How many legs have {many}?",
                "On how many legs does {key} walk?",
                "Count the legs of {key}.",
                "How many legs are on {key}?",
                "What is the number of legs {key} has?",
            ),
            ("the number of legs of {key}",),
            (
                "how many legs {key} has",
                "how many legs {many} have",
                "how many legs there are on {key}",
                "on how many legs {key} walks",
            ),
            (
                "Tell me how many legs {many} have.",
                "Do you know how many legs {key} has?",
                "What number of legs does {key} have?",
            ),
        ),
    ),
    "sounds": (
        Wording(
            SOUNDS,
            "{Key} says {value}.",
            (
                "What sound does {key} make?",
                "What does {key} say?",
                "Which sound does {key} make?",
                "What sound do {many} make?",
                "How does {key} sound?",
                "What noise does {key} make?",
                "What noise do {many} make?",
                "How do {many} sound?",
            ),
            (
                "the sound of {key}",
                "the sound that {many} make",
            ),
            (
                "what sound {key} makes",
                "what {key} says",
                "which sound {key} makes",
                "what sound {many} make",
                "how {key} sounds",
            ),
            (
                "Tell me what sound {key} makes.",
                "Which sound do {many} make?",
                "What do {many} say?",
            ),
        ),
    ),
    "homes": (
        Wording(
            HOMES,
            "{Key} lives in {value}.",
            (
                "Where does {key} live?",
                "Where do {many} live?",
                "In what place does {key} live?",
                "Where is the home of {key}?",
                "In which place do {many} live?",
                "What place does {key} live in?",
            ),
            (
                "the home of {key}",
                "the place where {key} lives",
            ),
            (
                "where {key} lives",
                "where {many} live",
                "in what place {key} lives",
                "what the home of {key} is",
            ),
            (
                "Tell me where {many} live.",
                "Do you know where {key} lives?",
                "In what place do {many} live?",
            ),
        ),
    ),
    "young": (
        Wording(
            YOUNG,
            "The young of {key} is called {value}.",
            (
                "What is the young of {key} called?",
                "What is a young {bare} called?",
                "What do you call a young {bare}?",
                "What is a baby {bare} called?",
                "What do you call a baby {bare}?",
                "What is the baby of {key} called?",
                "How do you call a baby {bare}?",
                "How is a young {bare} called?",
            ),
            (
                "the young of {key}",
                "the baby of {key}",
                "the name of a young {bare}",
                "the name of a baby {bare}",
            ),
            (
                "what a young {bare} is called",
                "what a baby {bare} is called",
                "what the young of {key} is called",
            ),
            (
                "What do you call the young of {key}?",
                "What do you call the baby of {key}?",
                "How is a baby {bare} called?",
            ),
        ),
    ),
    "kinds": (
        Wording(
            KINDS,
            "{Key} is {value}.",
            (
                "What is {key}?",
                "What's {key}?",
                "What kind of thing is {key}?",
                "What sort of thing is {key}?",
                "What is {key}, please?",
                "Explain what {key} is.",
            ),
            (),
            (
                "what {key} is",
                "what kind of thing {key} is",
                "what sort of thing {key} is",
            ),
            ("Do you know what {key} is?", "Can you tell me what {key} is?"),
        ),
    ),
    "opposites": (
        Wording(
            _both_ways(OPPOSITES),
            "The opposite of {key} is {value}.",
            (
                "Which word is the opposite of {key}?",
                "{Key} is the opposite of what?",
                "Which is the opposite of {key}?",
                "What word means the opposite of {key}?",
            ),
            ("the opposite of {key}",),
            (
                "what the opposite of {key} is",
                "which word is the opposite of {key}",
                "what word is the opposite of {key}",
            ),
            (
                "Do you know the opposite of {key}?",
                "What word is the opposite of {key}?",
                "Tell me what the opposite of {key} is.",
            ),
        ),
    ),
    "plurals": (
        Wording(
            PLURALS,
            "The plural of {key} is {value}.",
            (
                "How do you write the plural of {key}?",
                "Which is the plural of {key}?",
                "How do I write the plural of {key}?",
                "What do you call more than one {key}?",
            ),
            (
                "the plural of {key}",
                "the plural form of {key}",
            ),
            (
                "what the plural of {key} is",
                "how to write the plural of {key}",
                "what the plural form of {key} is",
            ),
            (
                "Do you know the plural of {key}?",
                "Give me the plural form of {key}.",
                "Tell me what the plural of {key} is.",
            ),
        ),
    ),
    "calendar": tuple(
        Wording(
            rows,
            f"{{value}} comes {side} {{key}}.",
            (
                f"What {unit} comes {side} {{key}}?",
                f"Which {unit} comes {side} {{key}}?",
                f"What comes {side} {{key}}?",
                f"Which {unit} is {side} {{key}}?",
                f"What is {side} {{key}}?",
            ),
            (f"the {unit} {side} {{key}}", f"the {unit} that comes {side} {{key}}"),
            (
                f"what {unit} comes {side} {{key}}",
                f"which {unit} comes {side} {{key}}",
                f"what comes {side} {{key}}",
                f"which {unit} is {side} {{key}}",
            ),
            (f"What {unit} is {side} {{key}}?", f"Tell me which {unit} comes {side} {{key}}."),
        )
        for unit, names in (("day", DAYS), ("month", MONTHS))
        for side, rows in (("after", _successors(names)), ("before", _predecessors(names)))
    )
    + tuple(
        Wording(
            dict(zip(ORDINALS, names, strict=False)),
            f"{{value}} is the {{key}} {unit} of the {span}.",
            (
                f"Which {unit} is the {{key}} of the {span}?",
                f"Which {unit} is the {{key}} {unit} of the {span}?",
                f"Which {unit} of the {span} is the {{key}}?",
            ),
            (f"the {{key}} {unit} of the {span}", f"the {{key}} {unit}"),
            (
                f"what the {{key}} {unit} of the {span} is",
                f"which {unit} is the {{key}} of the {span}",
            ),
            (f"Which is the {{key}} {unit} of the {span}?", f"Name the {{key}} {unit}."),
        )
        for unit, span, names in (("day", "week", DAYS), ("month", "year", MONTHS))
    )
    + (
        Wording(
            {month: str(length) for month, length in MONTH_LENGTHS.items()},
            "{key} has {value} days.",
            (
                "How many days does {key} have?",
                "How many days are in {key}?",
                "How many days has {key}?",
                "How long is {key}?",
            ),
            ("the number of days in {key}", "the length of {key}"),
            (
                "how many days {key} has",
                "how many days are in {key}",
                "how many days there are in {key}",
                "how long {key} is",
            ),
            ("How many days are there in {key}?", "Do you know how many days {key} has?"),
        ),
    ),
    "definitions": (
        Wording(
            DEFINITIONS,
            "{value}",
            (
                "What is {key}?",
                "What's {key}?",
                "Do you know {key}?",
                "Define {bare}.",
                "Explain {bare}.",
                "Explain {key}.",
                "What does {bare} mean?",
                "Describe {key}.",
                "What is {bare} in LLM serving?",
                "Explain what {key} is.",
                "What does {key} do?",
            ),
            (
                "the definition of {bare}",
                "the meaning of {bare}",
            ),
            (
                "what {key} is",
                "what {bare} means",
                "what is meant by {bare}",
            ),
            (
                "Can you explain {bare}?",
                "Tell me what {bare} means.",
                "Give me the definition of {bare}.",
            ),
        ),
    ),
}

EXCHANGES: dict[str, tuple[Exchange, ...]] = {
    "calendar": CALENDAR,
    "servekit": SERVEKIT,
    "identity": IDENTITY,
    "unknown": (Exchange(UNKNOWN_ANSWER, UNKNOWN_TRAINED, UNKNOWN_HELD_OUT),),
}

# Declining what lies outside the tables is a courtesy, not a fact: it is reported, but does not
# count towards the facts.
FACT_CATEGORIES: tuple[str, ...] = tuple(dict.fromkeys(name for name in (*WORDINGS, *EXCHANGES) if name != "unknown"))
