"""Claims about comparisons: what counts as a loss, and what does not."""

from __future__ import annotations

from servekit.evaluation.comparison import Comparison, compare
from servekit.evaluation.measurement import ALL, Answer, Measurement, summarise
from servekit.evaluation.perplexity import TextScore, TokenScore
from servekit.evaluation.questions import Question

LIMITS = (0.01, 0.02)


def measurement(answers: list[str], losses: list[float] | None = None) -> Measurement:
    text = None
    if losses is not None:
        text = TextScore(list(range(len(losses))), [TokenScore(-loss, "a") for loss in losses], 1000)
    return Measurement("http://server", "model", text, [Answer(answer, list(answer)) for answer in answers])


def compared(ours: str, theirs: str, categories: str | None = None) -> Comparison:
    """Compare two servers; each letter is an answer, `y` the right one, and each category has one letter, too."""
    questions = [Question(prompt="?", answer="y", category=category) for category in categories or "c" * len(ours)]
    return compare(questions, measurement(list(ours)), measurement(list(theirs)), None)


def test_a_server_compared_with_itself_has_no_loss() -> None:
    losses = [float(number % 5) for number in range(200)]
    questions = [Question(prompt="?", answer="y")] * 3
    one = measurement(["y", "n", "y"], losses)
    found = compare(questions, one, one, None)
    assert found.perplexity is not None and found.perplexity.increase.estimate == 0.0
    assert found.perplexity.same_likeliest == 1.0
    assert found.categories[0].difference.estimate == 0.0 and found.categories[0].p_value == 1.0
    assert found.agreement is not None and found.agreement.num_identical == 3
    assert found.agreement.first_difference is None
    assert not found.losses(0.0, 0.0)


def test_a_large_drop_over_many_questions_is_a_loss() -> None:
    found = compared("n" * 20 + "y" * 80, "y" * 100)
    assert found.categories[0].difference.estimate == -0.2
    assert any(ALL in loss and "20.00" in loss for loss in found.losses(*LIMITS))


def test_a_drop_that_chance_explains_is_no_loss() -> None:
    assert not compared("n" * 3 + "y" * 7, "y" * 10).losses(*LIMITS)


def test_a_significant_drop_within_the_limit_is_no_loss() -> None:
    found = compared("n" * 20 + "y" * 3980, "y" * 4000)
    assert found.categories[0].p_value < 0.001 and not found.losses(*LIMITS)
    assert found.losses(0.004, 0.02)


def test_a_gain_is_no_loss() -> None:
    assert not compared("y" * 100, "n" * 50 + "y" * 50).losses(0.0, 0.0)


def test_a_category_may_fall_although_all_questions_together_do_not() -> None:
    ours = "n" * 30 + "y" * 30
    theirs = "y" * 30 + "n" * 30
    found = compared(ours, theirs, "a" * 30 + "b" * 30)
    (loss,) = found.losses(*LIMITS)
    assert loss.startswith("a: 100.00 percentage points")


def test_the_best_of_many_categories_is_no_alarm() -> None:
    """Six answers lost of one category are significant alone (p = 0.03), and are not the worst of ten categories."""
    ours, theirs = "n" * 6 + "y" * 94, "y" * 100
    assert compared(ours[:10], theirs[:10], "a" * 10).categories[1].p_value < 0.05
    found = compared(ours, theirs, "".join(letter * 10 for letter in "abcdefghij"))
    assert found.categories[1].category == "a" and found.categories[1].p_value > 0.05
    (loss,) = found.losses(*LIMITS)
    assert loss.startswith(ALL)


def test_a_higher_perplexity_is_a_loss_if_it_is_significant_and_over_the_limit() -> None:
    losses = [float(number % 5) for number in range(2_000)]
    noisy = [loss + (0.05 if number % 3 else -0.01) for number, loss in enumerate(losses)]  # 0.03 on average
    found = compare([], measurement([], noisy), measurement([], losses), None)
    assert found.perplexity is not None and 0.03 < found.perplexity.increase.estimate < 0.031
    assert len(found.losses(*LIMITS)) == 1 and not found.losses(0.01, 0.04)
    wild = [loss + (9.0 if number == 7 else 0.0) * 20 for number, loss in enumerate(losses)]  # one token explains it
    assert not compare([], measurement([], wild), measurement([], losses), None).losses(*LIMITS)


def test_the_first_difference_is_counted_in_tokens() -> None:
    questions = [Question(prompt="?")] * 4
    ours, theirs = measurement(["abcd", "abcd", "ab", "same"]), measurement(["abxd", "axcd", "abc", "same"])
    agreement = compare(questions, ours, theirs, None).agreement
    assert agreement is not None
    assert (agreement.num, agreement.num_identical, agreement.first_difference) == (4, 1, 2.0)  # of 2, 1 and 2


def test_questions_without_an_answer_are_not_scored() -> None:
    questions = [Question(prompt="?"), Question(prompt="?", answer="y", category="b")]
    summary = summarise(questions, measurement(["a", "y"]))
    assert [(each.category, each.num) for each in summary.categories] == [(ALL, 1), ("b", 1)]
