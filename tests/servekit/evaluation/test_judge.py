"""Claims about the judge: only an answer that wins in both orders wins."""

from __future__ import annotations

import pytest

from servekit.evaluation.judge import Verdict, judgement, messages, verdict
from servekit.evaluation.questions import Message, Question


@pytest.mark.parametrize(
    ("reply", "swapped", "expected"),
    [
        ("[[A]]", "[[B]]", Verdict.FIRST),
        ("[[B]]", "[[A]]", Verdict.SECOND),
        ("[[A]]", "[[A]]", Verdict.TIE),  # the judge prefers what stands first
        ("[[B]]", "[[B]]", Verdict.TIE),
        ("[[C]]", "[[B]]", Verdict.TIE),
        ("[[A]] would be wrong, so [[B]]", "It is\n[[A]]", Verdict.SECOND),
        ("A", "[[B]]", Verdict.UNREADABLE),
        ("[[A]]", "", Verdict.UNREADABLE),
    ],
)
def test_an_answer_wins_if_it_wins_in_both_orders(reply: str, swapped: str, expected: Verdict) -> None:
    assert verdict(reply, swapped) is expected


def test_verdicts_are_counted_and_tested() -> None:
    found = judgement("judge", [Verdict.SECOND] * 6 + [Verdict.TIE] * 3 + [Verdict.UNREADABLE])
    assert (found.num_first, found.num_second, found.num_ties, found.num_unreadable) == (0, 6, 3, 1)
    assert found.p_value == pytest.approx(2 / 64)


def test_the_judge_reads_the_question_the_reference_and_both_answers() -> None:
    question = Question(messages=[Message("user", "Who?")], answer=["Ann", "Anna"])
    _, asked = messages(question, "It was Bob.", "It was Ann.")
    places = [asked.content.index(part) for part in ("user: Who?", "Ann / Anna", "It was Bob.", "It was Ann.")]
    assert places == sorted(places)
