"""Evaluate the demo model with questions and wordings that training never used, and print a table.

An answer counts only when it is right letter for letter and ends by itself. Facts are asked in
held-out wordings, exercises with held-out operands, tools with held-out wordings and cities; a story must name its hero
and come to an end.
The exit status is 1 when fewer than 95 % of the facts are right.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from question_set import NEW_TOKENS, STORY_END, STORY_TOKENS, all_questions
from questions import Question
from stories import story_requests
from tokenizer import ASSISTANT, BOS, EOS, SYSTEM, USER
from tool_calls import Talk, held_out_talks
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from wordings import FACT_CATEGORIES

REQUIRED_FACTS = 0.95
TOOL_TOKENS = 160
BATCH_ROWS = 128


class Score(NamedTuple):
    """How many of the questions of one category were answered right, in one form."""

    asked: int
    right: int

    def share(self) -> float:
        """The right answers as a share of all."""
        return self.right / self.asked


class Form(NamedTuple):
    """A way to ask: how a prompt becomes the text that the model continues."""

    name: str
    render: Callable[[str], str]


def forms(tokenizer: Tokenizer) -> tuple[Form, Form]:
    """The bare prompt, and the same through the chat template."""

    def chat(prompt: str) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )

    return Form("bare", lambda prompt: tokenizer.bos_token + prompt), Form("chat", chat)


def before_the_last_answer(talk: Talk) -> str:
    """The text of a talk as the chat template writes it, up to its last answer."""
    text = BOS + (f"{SYSTEM}{talk.tools}{EOS}" if talk.tools else "")
    for turn in talk.turns[:-1]:
        text += f"{USER}{turn.prompt}{EOS}{ASSISTANT}{turn.answer}{EOS}"
    return f"{text}{USER}{talk.turns[-1].prompt}{EOS}{ASSISTANT}"


@torch.inference_mode()
def answers(model: PreTrainedModel, tokenizer: Tokenizer, texts: list[str], new_tokens: int) -> list[str]:
    """The greedy continuation of each text, up to and including the end token."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    continuations = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [text.replace(tokenizer.pad_token, "") for text in continuations]


def all_answers(model: PreTrainedModel, tokenizer: Tokenizer, texts: list[str], new_tokens: int) -> list[str]:
    """`answers` in batches of texts of like length, in the order asked."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: dict[int, str] = {}
    for start in tqdm(range(0, len(order), BATCH_ROWS), desc="batches", disable=None, leave=False):
        indices = order[start : start + BATCH_ROWS]
        batch = answers(model, tokenizer, [texts[index] for index in indices], new_tokens)
        found.update(zip(indices, batch, strict=True))
    return [found[index] for index in range(len(texts))]


class Examination:
    """A model under examination: asks, compares and keeps what went wrong."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.scores: dict[str, dict[str, Score]] = defaultdict(dict)
        self.mistakes: list[str] = []

    def _record(self, form: Form, category: str, results: list[bool]) -> None:
        self.scores[category][form.name] = Score(len(results), sum(results))

    def ask(self, questions: list[Question], form: Form) -> None:
        """Score the questions, category by category."""
        texts = [form.render(question.prompt) for question in questions]
        given = all_answers(self.model, self.tokenizer, texts, NEW_TOKENS)
        results = defaultdict(list)
        for question, answer in zip(questions, given, strict=True):
            right = answer.strip() == question.answer + self.tokenizer.eos_token
            results[question.category].append(right)
            if not right:
                self.mistakes.append(f"{form.name}: {question.prompt!r} -> {answer!r}")
        for category, marks in results.items():
            self._record(form, category, marks)

    def ask_for_stories(self, form: Form) -> None:
        """Score the stories: each about its hero, and with an end."""
        requests = story_requests()
        texts = [form.render(request) for request in requests.values()]
        told = all_answers(self.model, self.tokenizer, texts, STORY_TOKENS)
        ending = STORY_END + self.tokenizer.eos_token
        good = [f" {hero}" in text and text.endswith(ending) for hero, text in zip(requests, told, strict=True)]
        self._record(form, "stories", good)

    def offer_tools(self, talks: list[Talk], form: Form) -> None:
        """Score the last answers of talks with tools: calls, what is made of results, and answers without a call."""
        texts = [before_the_last_answer(talk) for talk in talks]
        given = all_answers(self.model, self.tokenizer, texts, TOOL_TOKENS)
        results = defaultdict(list)
        for talk, text, answer in zip(talks, texts, given, strict=True):
            right = answer.strip() == talk.turns[-1].answer + self.tokenizer.eos_token
            results[talk.category].append(right)
            if not right:
                self.mistakes.append(f"{form.name}: {text!r} -> {answer!r}")
        for category, marks in results.items():
            self._record(form, category, marks)

    def fact_share(self) -> float:
        """The share of facts that were right, over all categories and forms."""
        scores = [score for category in FACT_CATEGORIES for score in self.scores[category].values()]
        return sum(score.right for score in scores) / sum(score.asked for score in scores)

    def table(self) -> str:
        """The scores, one line per category."""
        lines = [f"{'category':<16}{'n':>6}{'bare':>8}{'chat':>8}"]
        for category, by_form in self.scores.items():
            shares = [f"{by_form[form].share():.3f}" if form in by_form else "" for form in ("bare", "chat")]
            lines.append(f"{category:<16}{by_form['chat'].asked:>6}{shares[0]:>8}{shares[1]:>8}")
        return "\n".join([*lines, f"facts, all forms: {self.fact_share():.3f}"])


def examine(directory: Path, seed: int) -> Examination:
    """Ask everything in both forms, but for tools, which only the chat template offers."""
    examination = Examination(directory)
    questions = all_questions(seed)
    bare, chat = forms(examination.tokenizer)
    for form in (bare, chat):
        examination.ask(questions, form)
        examination.ask_for_stories(form)
    examination.offer_tools(held_out_talks(questions, seed), chat)
    return examination


def main() -> int:
    """Print the table; with `--mistakes`, each wrong answer before it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mistakes", action="store_true", help="print every wrong answer")
    arguments = parser.parse_args()
    examination = examine(arguments.model, arguments.seed)
    if arguments.mistakes:
        print("\n".join(examination.mistakes))
    print(examination.table())
    return 0 if examination.fact_share() >= REQUIRED_FACTS else 1


if __name__ == "__main__":
    raise SystemExit(main())
