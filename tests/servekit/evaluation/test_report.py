"""Claims about reports: tables are Markdown, and nothing that a server says breaks them."""

from __future__ import annotations

import json

from servekit.evaluation.comparison import compare
from servekit.evaluation.judge import Verdict, judgement
from servekit.evaluation.measurement import Answer, Measurement, summarise
from servekit.evaluation.perplexity import TextScore, TokenScore
from servekit.evaluation.questions import Question
from servekit.evaluation.report import Report, as_json, as_markdown, table

QUESTIONS = [Question(prompt="?", answer="y", category="a|b"), Question(prompt="?", answer="y", category="c\x1b[2J")]


def measurement(answers: list[str]) -> Measurement:
    text = TextScore(list(range(20)), [TokenScore(-float(number % 3), "a") for number in range(20)], 50)
    return Measurement("http://server", "a model", text, [Answer(answer, [answer]) for answer in answers])


def report() -> Report:
    first, second = measurement(["n", "n"]), measurement(["y", "y"])
    comparison = compare(QUESTIONS, first, second, judgement("judge", [Verdict.SECOND, Verdict.TIE]))
    return Report([summarise(QUESTIONS, each) for each in (first, second)], comparison, ["it is worse"])


def test_all_rows_of_a_table_have_the_same_width_and_cells() -> None:
    lines = table(["a", "b"], [["long cell", "1"], ["x|y", "200,000"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1] == "| --------- | ------: |"
    assert r"x\|y" in lines[3]


def test_a_report_has_a_table_of_everything_that_was_measured() -> None:
    text = as_markdown(report())
    for part in ("bits per byte", "same likeliest token", "all questions", r"a\|b", "identical answers", "judged by"):
        assert part in text
    assert "0 better, 1 worse, 1 ties" in text and text.endswith("LOSS: it is worse\n")
    assert "\x1b" not in text


def test_a_report_of_one_server_has_its_categories() -> None:
    text = as_markdown(Report([summarise(QUESTIONS, measurement(["y", "n"]))], None, []))
    assert "50.00 %" in text and "LOSS" not in text and "difference" not in text


def test_the_json_has_the_figures_and_not_the_answers() -> None:
    found = json.loads(as_json(report()))
    assert found["comparison"]["categories"][0]["difference"]["estimate"] == -1.0
    assert found["losses"] == ["it is worse"] and "answers" not in found["servers"][0]
