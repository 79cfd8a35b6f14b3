"""The questions of the evaluation, with answers; as a program, write them as a file for `servekit eval`.

    python scripts/demo_model/question_set.py --out servekit/assets/demo_model/questions.jsonl

Facts are asked in held-out wordings, exercises with held-out operands.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

from exercises import MAKERS, exercise
from questions import Question, question_groups
from stories import story_requests
from wordings import FACT_CATEGORIES

EXERCISES_PER_CATEGORY = 60
NEW_TOKENS = 110
STORY_TOKENS = 220
STORY_END = "The end."

# What a newcomer is sure to type; asked as it stands, whether or not training did.
FIRST_CONTACT = (
    Question("first contact", "What color is the sky?", "The sky is blue."),
    Question("first contact", "what colour is the sky", "The sky is blue."),
    Question("first contact", "How many legs does a cat have?", "A cat has four legs."),
    Question("first contact", "how many legs does a cat have", "A cat has four legs."),
    Question("first contact", "What is the capital of Japan?", "The capital of Japan is Tokyo."),
    Question("first contact", "what is the capital of japan", "The capital of Japan is Tokyo."),
)


def all_questions(seed: int) -> list[Question]:
    """Every question but the stories, which have no single right answer."""
    facts = _fact_questions()
    return [*FIRST_CONTACT, *facts, *_hurried(facts), *_exercise_questions(seed)]


def _fact_questions() -> list[Question]:
    """Every fact, in every held-out wording."""
    return [
        question
        for category in (*FACT_CATEGORIES, "unknown")
        for group in question_groups(category, held_out=True)
        for question in group
    ]


def _hurried(questions: Iterable[Question]) -> list[Question]:
    """One wording in three of the facts, in lower case and without an end mark."""
    return [
        Question("in lower case", question.prompt.lower().rstrip("?.!"), question.answer)
        for question in list(questions)[::3]
    ]


def _exercise_questions(seed: int) -> list[Question]:
    """Distinct exercises with operands that training held out."""
    rng = random.Random(f"evaluation/{seed}")
    questions = []
    for category in MAKERS:
        drawn = {exercise(category, rng, held_out=True) for _ in range(20 * EXERCISES_PER_CATEGORY)}
        questions += rng.sample(sorted(drawn), min(EXERCISES_PER_CATEGORY, len(drawn)))
    return questions


def lines(seed: int) -> list[str]:
    """The questions as JSON, in the format of `servekit eval`."""
    asked = [
        {"category": category, "prompt": prompt, "answer": answer, "max_tokens": NEW_TOKENS}
        for category, prompt, answer in all_questions(seed)
    ]
    told = [
        {
            "category": "stories",
            "prompt": request,
            "answer": f"(?s) {hero}.*{re.escape(STORY_END)}$",
            "score": "regex",
            "max_tokens": STORY_TOKENS,
        }
        for hero, request in story_requests().items()
    ]
    return [json.dumps(question, ensure_ascii=False) for question in (*asked, *told)]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.write_text("".join(line + "\n" for line in lines(arguments.seed)), encoding="utf-8")


if __name__ == "__main__":
    main()
