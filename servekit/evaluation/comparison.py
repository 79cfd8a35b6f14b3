"""Compare two servers: the first is under test, and the second is the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from servekit.evaluation.judge import Judgement
from servekit.evaluation.measurement import Answer, Measurement, marks
from servekit.evaluation.perplexity import perplexity_ratio, same_likeliest
from servekit.evaluation.questions import Question
from servekit.evaluation.statistics import (
    SIGNIFICANCE,
    Interval,
    holm_p_values,
    mcnemar_p_value,
    share_difference,
)


class CategoryDifference(Struct):
    """The shares of right answers of two servers, in one category."""

    category: str
    num: int
    first: float
    second: float
    difference: Interval  # of the shares, first minus second
    p_value: float  # of no difference; of single categories adjusted, because there are many of them


class PerplexityDifference(Struct):
    """The perplexities of two servers."""

    first: float
    second: float
    increase: Interval  # relative: 0.02 is 2 % more than the second's
    same_likeliest: float | None  # share of the text's tokens at which both would choose the same token


class Agreement(Struct):
    """How many generated answers are identical."""

    num: int
    num_identical: int
    first_difference: float | None  # median position, in tokens, of the first that differs, in answers that differ


class Comparison(Struct):
    """All results of the comparison of two servers."""

    perplexity: PerplexityDifference | None
    categories: list[CategoryDifference]  # first all questions together
    agreement: Agreement | None
    judgement: Judgement | None

    def losses(self, max_drop: float, max_perplexity_increase: float) -> list[str]:
        """Return a sentence for each loss of the first server that exceeds its limit and is significant."""
        found = []
        worse = self.perplexity
        if worse is not None and worse.increase.estimate > max_perplexity_increase and worse.increase.low > 0.0:
            found.append(
                f"the perplexity is {100 * worse.increase.estimate:.2f} % higher; the limit is "
                f"{100 * max_perplexity_increase:g} % (--max-perplexity-increase)"
            )
        found += [
            f"{each.category}: {-100 * each.difference.estimate:.2f} percentage points fewer right answers; the limit "
            f"is {100 * max_drop:g} (--max-drop)"
            for each in self.categories
            if -each.difference.estimate > max_drop and each.p_value < SIGNIFICANCE
        ]
        return found


def compare(
    questions: Sequence[Question], first: Measurement, second: Measurement, judgement: Judgement | None
) -> Comparison:
    """Compare two servers that read the same tokens of a text and answered the same questions."""
    perplexity = None
    if first.text is not None and second.text is not None:
        ratio = perplexity_ratio(first.text, second.text)
        perplexity = PerplexityDifference(
            first.text.perplexity.estimate,
            second.text.perplexity.estimate,
            Interval(ratio.estimate - 1.0, ratio.low - 1.0, ratio.high - 1.0),
            same_likeliest(first.text.scores, second.text.scores),
        )
    return Comparison(
        perplexity, _categories(questions, first, second), _agreement(questions, first, second), judgement
    )


def _categories(questions: Sequence[Question], first: Measurement, second: Measurement) -> list[CategoryDifference]:
    ours, theirs = marks(questions, first), marks(questions, second)
    found = []
    for category, right in ours.items():
        pairs = list(zip(right, theirs[category], strict=True))
        only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
        found.append(
            CategoryDifference(
                category,
                len(pairs),
                sum(right) / len(pairs),
                sum(theirs[category]) / len(pairs),
                share_difference(only_first, only_second, len(pairs)),
                mcnemar_p_value(only_first, only_second),
            )
        )
    for each, p_value in zip(found[1:], holm_p_values([each.p_value for each in found[1:]]), strict=True):
        each.p_value = p_value
    return found


def _agreement(questions: Sequence[Question], first: Measurement, second: Measurement) -> Agreement | None:
    pairs = [
        (ours, theirs)
        for question, ours, theirs in zip(questions, first.answers, second.answers, strict=True)
        if not question.is_choice
    ]
    if not pairs:
        return None
    different = [(ours, theirs) for ours, theirs in pairs if ours.text != theirs.text]
    positions = [place for ours, theirs in different if (place := _first_difference(ours, theirs)) is not None]
    return Agreement(len(pairs), len(pairs) - len(different), float(median(positions)) if positions else None)


def _first_difference(ours: Answer, theirs: Answer) -> int | None:
    """Return how many tokens are equal before the first that differs; None if a server returns no tokens."""
    if ours.tokens is None or theirs.tokens is None:
        return None
    pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
    length = min(len(ours.tokens), len(theirs.tokens))
    return next((place for place, (one, other) in pairs if one != other), length)
