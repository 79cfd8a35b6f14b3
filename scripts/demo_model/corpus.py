"""Documents for training: questions and exercises, as chat or bare text, packed in rows.

The batch of a step is a pure function of seed and step, so a run resumes where it stopped with no
state but the step number, and no corpus is ever stored.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from exercises import exercise
from questions import Question, casual, question_groups
from stories import story
from tokenizer import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, SYSTEM, USER
from tokenizers import Tokenizer
from tool_calls import Talk, call_talk, declined_talk, offered_in_vain, round_trip
from torch import Tensor
from wordings import EXCHANGES, WORDINGS


class Mix(NamedTuple):
    """How often each kind of document is drawn, relative to the others."""

    name: str
    shares: dict[str, float]


ASKED_MIX: dict[str, float] = {
    "facts": 40,
    "unknown": 3,
    "strangers": 4,
    "counting": 15,
    "neighbors": 4,
    "arithmetic": 10,
    "repeating": 13,
    "reading": 8,
}
# Copying never stops: the model forgets how to look back at its prompt within a few hundred steps
# in which nothing asks for it.
SHORT_MIX = Mix("short", ASKED_MIX | {"copying": 8, "tools": 11})
LONG_MIX = Mix("long", {"stories": 35, "conversations": 35, "copying": 15, "tool conversations": 40})
# What is asked with tools in short rows: a call, the same with its result, what needs no tool, a tool that is missing.
TOOLS_MIX: dict[str, float] = {"call": 25, "round trip": 25, "plain": 20, "missing": 30}

# A category weighs less than its number of facts: those of a small one must still be seen.
FACT_WEIGHT_EXPONENT = 0.6

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer in one sentence.",
    "You are servekit.",
    "Be brief.",
)

# What may stand between a bare prompt and its answer; the first is what a bare prompt gets by
# itself, the others are what people type.
BARE_FORMS: tuple[tuple[str, str], ...] = (
    ("{prompt}", " {answer}"),
    ("{prompt}", " {answer}"),
    ("{prompt}", " {answer}"),
    ("{prompt}", " {answer}"),
    ("{prompt}\n", "{answer}"),
    ("{prompt} ", "{answer}"),
    ("Question: {prompt}\nAnswer:", " {answer}"),
    ("Q: {prompt}\nA:", " {answer}"),
)

# Texts that people also begin themselves, and between which shares of the words they then give: a
# fact must be nearly told before only one end fits, a story hardly begun.
COMPLETED: dict[str, tuple[float, float]] = {"facts": (0.6, 1.0), "stories": (0.03, 0.2)}

BARE_SHARE = 0.6
COMPLETION_SHARE = 0.15
SYSTEM_SHARE = 0.1

# Random copying begins with few distinct tokens, where the circuit for it forms at once, and
# spreads to the whole vocabulary from there.
COPY_ALPHABETS = (32, 128, 512, None)
COPY_LENGTHS = (3, 24)


class Document(NamedTuple):
    """Token ids, and for each whether the model is trained to say it."""

    ids: list[int]
    learned: list[bool]


class Batch(NamedTuple):
    """Packed rows of ids; labels are -100 where nothing is learned, owners number the documents."""

    ids: Tensor
    labels: Tensor
    owners: Tensor

    def mask(self) -> Tensor:
        """Which position may attend to which: earlier ones of its own document."""
        same_document = self.owners[:, :, None] == self.owners[:, None, :]
        return same_document.tril()[:, None]


class Renderer:
    """Turns questions into documents, in the very tokens a server would feed to the model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        self.ordinary = list(range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size()))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, turns: list[Question], *systems: str) -> Document:
        """The turns as the chat template writes them. `systems`: the tools, and what the system says, if any."""
        parts = [([self.special[BOS]], False)]
        parts += [
            ([self.special[SYSTEM], *self._encode(system), self.special[EOS]], False)
            for system in filter(None, systems)
        ]
        for turn in turns:
            asked = [self.special[USER], *self._encode(turn.prompt), self.special[EOS]]
            parts.append(([*asked, self.special[ASSISTANT]], False))
            parts.append(([*self._encode(turn.answer), self.special[EOS]], True))
        return _join(parts)

    def bare(self, question: Question, form: tuple[str, str]) -> Document:
        """The question as plain text that the answer continues."""
        before, after = form
        prompt = self._encode(before.format(prompt=question.prompt))
        answer = self._encode(after.format(answer=question.answer))
        return _join([([self.special[BOS], *prompt], False), ([*answer, self.special[EOS]], True)])

    def completion(self, text: str, share: tuple[float, float], rng: random.Random) -> Document:
        """A text broken off between the given shares of its words, to be completed."""
        words = text.split(" ")
        kept = math.ceil(rng.uniform(*share) * len(words))
        kept = max(1, min(kept, len(words) - 1))
        start = self._encode(" ".join(words[:kept]))
        rest = self._encode("".join(f" {word}" for word in words[kept:]))
        return _join([([self.special[BOS], *start], False), ([*rest, self.special[EOS]], True)])

    def copy(self, rng: random.Random, alphabet: int | None) -> Document:
        """Random tokens twice over, the second time to be learned."""
        tokens = rng.choices(self.ordinary[:alphabet], k=rng.randint(*COPY_LENGTHS))
        first = [self.special[BOS], *tokens, self.special[PAD]]
        return _join([(first, False), ([*tokens, self.special[EOS]], True)])


def _join(parts: list[tuple[list[int], bool]]) -> Document:
    ids = [token for tokens, _ in parts for token in tokens]
    learned = [flag for tokens, flag in parts for _ in tokens]
    return Document(ids, learned)


class Lessons:
    """Draws questions by kind, as often and as casually as people ask them."""

    def __init__(self) -> None:
        categories = sorted({*WORDINGS, *EXCHANGES} - {"unknown"})
        self.facts = [question_groups(category, held_out=False) for category in categories]
        self.fact_weights = [len(groups) ** FACT_WEIGHT_EXPONENT for groups in self.facts]
        (self.unknown,) = question_groups("unknown", held_out=False)

    def _fact(self, rng: random.Random) -> Question:
        (groups,) = rng.choices(self.facts, self.fact_weights)
        return rng.choice(rng.choice(groups))

    def _plain_question(self, kind: str, rng: random.Random) -> Question:
        if kind == "facts":
            return self._fact(rng)
        if kind == "unknown":
            return rng.choice(self.unknown)
        if kind == "stories":
            return story(rng)
        return exercise(kind, rng, held_out=False)

    def question(self, kind: str, rng: random.Random) -> Question:
        """One question of the kind, casually put where that does not change the answer."""
        question = self._plain_question(kind, rng)
        if kind in ("repeating", "reading"):
            return question
        return question._replace(prompt=casual(question.prompt, rng))

    def conversation(self, rng: random.Random) -> list[Question]:
        """A few questions in a row, each on its own subject."""
        kinds = rng.choices(list(ASKED_MIX), list(ASKED_MIX.values()), k=rng.randint(2, 4))
        return [self.question(kind, rng) for kind in kinds]

    def _needs_no_tool(self, rng: random.Random) -> Question:
        while True:
            (kind,) = rng.choices(list(ASKED_MIX), list(ASKED_MIX.values()))
            question = self.question(kind, rng)
            if "weather" not in question.prompt:
                return question

    def tools(self, rng: random.Random) -> Talk:
        """One question, mostly with tools: it needs one, needs none, or misses one."""
        (kind,) = rng.choices(list(TOOLS_MIX), list(TOOLS_MIX.values()))
        if kind == "call":
            return call_talk(rng, held_out=False)
        if kind == "round trip":
            return round_trip(rng, held_out=False)
        if kind == "missing":
            return declined_talk(rng, held_out=False)
        return Talk(offered_in_vain(rng), [self._needs_no_tool(rng)])

    def tool_conversation(self, rng: random.Random) -> Talk:
        """A call, its result and the answer, at times with a question before and behind them that needs no tool."""
        tools, turns = round_trip(rng, held_out=False)
        before = [self._needs_no_tool(rng)] if rng.random() < 0.2 else []
        behind = [self._needs_no_tool(rng)] if rng.random() < 0.2 else []
        return Talk(tools, [*before, *turns, *behind])

    def texts(self, count: int, seed: int) -> Iterator[str]:
        """Prompts with their answers, to learn the tokenizer from."""
        rng = random.Random(f"{seed}/texts")
        mix = ASKED_MIX | {"stories": 10}
        for kind in rng.choices(list(mix), list(mix.values()), k=count):
            question = self.question(kind, rng)
            yield f"{question.prompt} {question.answer}"


def _system(rng: random.Random) -> str:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else ""


class Corpus:
    """The batch of each step."""

    def __init__(self, lessons: Lessons, renderer: Renderer, seed: int) -> None:
        self.lessons = lessons
        self.renderer = renderer
        self.seed = seed

    def _question_document(self, kind: str, rng: random.Random) -> Document:
        question = self.lessons.question(kind, rng)
        if kind in COMPLETED and rng.random() < COMPLETION_SHARE:
            return self.renderer.completion(question.answer, COMPLETED[kind], rng)
        if rng.random() < BARE_SHARE:
            return self.renderer.bare(question, rng.choice(BARE_FORMS))
        return self.renderer.chat([question], _system(rng))

    def _document(self, kind: str, rng: random.Random) -> Document:
        if kind == "copying":
            return self.renderer.copy(rng, None)
        if kind == "conversations":
            return self.renderer.chat(self.lessons.conversation(rng))
        if kind in ("tools", "tool conversations"):
            draw = self.lessons.tools if kind == "tools" else self.lessons.tool_conversation
            talk = draw(rng)
            if not talk.tools and rng.random() < BARE_SHARE:
                return self.renderer.bare(talk.turns[0], rng.choice(BARE_FORMS))
            return self.renderer.chat(talk.turns, talk.tools, _system(rng))
        return self._question_document(kind, rng)

    def mixed_batch(self, step: int, mix: Mix, rows: int, length: int) -> Batch:
        """Rows of documents in the proportions of the mix."""
        rng = random.Random(f"{self.seed}/{mix.name}/{step}")

        def draw() -> Document:
            (kind,) = rng.choices(list(mix.shares), list(mix.shares.values()))
            return self._document(kind, rng)

        return pack(draw, rows, length)

    def copy_batch(self, step: int, alphabet: int | None, rows: int, length: int) -> Batch:
        """Rows of nothing but random copying."""
        rng = random.Random(f"{self.seed}/copy/{step}")
        return pack(lambda: self.renderer.copy(rng, alphabet), rows, length)


def pack(draw: Callable[[], Document], rows: int, length: int) -> Batch:
    """Fill the rows first-fit with drawn documents, until one no longer fits anywhere."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    labels = torch.full((rows, length), -100)
    owners = torch.zeros(rows, length, dtype=torch.long)
    used = [0] * rows
    misses = 0
    while misses < 8:
        document = draw()
        size = len(document.ids)
        row = next((row for row in range(rows) if used[row] + size <= length), None)
        if row is None:
            misses += 1
            continue
        place = slice(used[row], used[row] + size)
        ids[row, place] = torch.tensor(document.ids)
        labels[row, place] = torch.tensor(document.ids).where(torch.tensor(document.learned), -100)
        owners[row, place] = used[row] + 1
        used[row] += size
    return Batch(ids, labels, owners)
