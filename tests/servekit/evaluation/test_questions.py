"""Claims about questions: which answers are right, and which lines of a file are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from servekit.errors import ConfigError
from servekit.evaluation.evaluation import DEMO_QUESTIONS
from servekit.evaluation.questions import Question, as_chats, evenly, parse_questions

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("fields", "text", "is_right"),
    [
        ({"answer": "Paris."}, " Paris.\n", True),
        ({"answer": "Paris."}, "Paris", False),
        ({"answer": ["Paris", "Paris."]}, "Paris", True),
        ({"answer": "paris", "score": "contains"}, "It is Paris, of course", True),
        ({"answer": "paris", "score": "contains"}, "It is Rome", False),
        ({"answer": r"^\d+$", "score": "regex"}, "42", True),
        ({"answer": r"^\d+$", "score": "regex"}, "42 or so", False),
        ({"answer": " yes", "choices": [" yes", " no"]}, " yes", True),
        ({"answer": " yes", "choices": [" yes", " no"]}, " no", False),
        ({}, "anything", None),
    ],
)
def test_an_answer_is_right_if_its_score_says_so(fields: dict[str, object], text: str, is_right: bool | None) -> None:
    assert Question(prompt="?", **fields).is_right(text) is is_right  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"prompt": "a", "anwser": "b"}', "anwser"),
        ('{"answer": "b"}', "either prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "either prompt or messages"),
        ('{"prompt": "a", "answer": "b", "score": "choice"}', "needs choices"),
        ('{"prompt": "a", "answer": "b", "choices": ["c", "d"]}', "one of the choices"),
        ('{"prompt": "a", "choices": ["c", "d"]}', "one of the choices"),
        ('{"prompt": "a", "answer": "c", "choices": ["c", "d"], "score": "exact"}', "leave out score"),
        ('{"messages": [{"role": "user", "content": "a"}], "answer": "c", "choices": ["c", "d"]}', "need a prompt"),
        ('{"prompt": "a", "answer": "(", "score": "regex"}', "not a regular expression"),
        ('{"prompt": "a", "max_tokens": 0}', ">= 1"),
    ],
)
def test_a_line_that_cannot_be_asked_is_refused_with_its_number(line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_questions(f'{{"prompt": "fine"}}\n\n{line}\n'.encode(), "file")
    assert refused.value.message.startswith("file, line 3: ") and reason in refused.value.message


def test_a_file_without_questions_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no questions"):
        parse_questions(b"\n\n", "file")


def test_a_line_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        parse_questions(b'{"prompt": "\xff"}', "file")


def test_prompts_become_messages_but_choices_stay_continuations() -> None:
    first, second = as_chats([Question(prompt="a", answer="b"), Question(prompt="a", answer="b", choices=["b", "c"])])
    assert first.prompt is None and [message.content for message in first.messages or []] == ["a"]
    assert first.answer == "b" and second.prompt == "a"


def test_a_limit_takes_questions_at_even_distances() -> None:
    questions = [Question(prompt=str(number)) for number in range(10)]
    assert [question.prompt for question in evenly(questions, 4)] == ["0", "2", "5", "7"]
    assert evenly(questions, 10) == questions == evenly(questions, 11)


def test_the_demo_models_file_is_what_its_script_writes(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "demo_model" / "question_set.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path / "questions.jsonl")], check=True)
    assert (tmp_path / "questions.jsonl").read_bytes() == DEMO_QUESTIONS.read_bytes()
    assert len(parse_questions(DEMO_QUESTIONS.read_bytes(), "demo")) > 1_500
