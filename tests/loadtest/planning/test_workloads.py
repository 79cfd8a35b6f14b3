"""Test workloads: lengths, texts, shared prefixes, and conversations."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import exp

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.planning.lengths import Lengths
from loadtest.planning.plan import Request
from loadtest.planning.planner import make_plan
from loadtest.planning.text import CHARACTERS_PER_TOKEN, VOCABULARY, TextGenerator, queries, zipf_ranks
from loadtest.planning.workloads import parse_workload


def drawn(text: str, count: int = 40_000) -> np.ndarray:
    return Lengths(text).draw(np.random.default_rng(7), count)


def words(characters_per_token: float = CHARACTERS_PER_TOKEN, seed: int = 0) -> TextGenerator:
    return TextGenerator(np.random.default_rng(seed), characters_per_token)


def requests(workload: str, count: int, **arguments: float) -> list[Request]:
    return make_plan("burst", workload, num_requests=count, **arguments).requests  # type: ignore[arg-type]


def test_lengths_have_the_moments_of_their_distributions() -> None:
    assert set(drawn("100").tolist()) == {100}
    counts = np.bincount(drawn("uniform:10-14"))[10:]
    assert len(counts) == 5 and np.all(np.abs(counts - 8000) < 4 * np.sqrt(8000 * 0.8)), "both ends included"
    normal = drawn("normal:500,40")
    assert np.mean(normal) == pytest.approx(500, abs=1) and np.std(normal) == pytest.approx(40, rel=0.02)
    lognormal = drawn("lognormal:300,0.5")
    assert np.median(lognormal) == pytest.approx(300, rel=0.01)
    assert np.mean(lognormal) == pytest.approx(300 * exp(0.125), rel=0.01)
    assert Counter(drawn("empirical:5,9,9,9").tolist())[9] == pytest.approx(30_000, abs=350)


def test_clipped_lengths_pile_up_on_the_bounds() -> None:
    clipped = drawn("normal:100,10|95-110")
    assert clipped.min() == 95 and clipped.max() == 110
    assert np.mean(clipped == 95) == pytest.approx(0.326, abs=0.01), "the normal distribution below 95.5"
    assert np.mean(clipped == 110) == pytest.approx(0.171, abs=0.01), "and from 109.5 on"
    assert drawn("normal:2,50").min() == 1, "no length is below 1"


def test_how_many_lengths_are_taken_does_not_change_the_first() -> None:
    first, again = (Lengths("normal:500,100").endless(np.random.default_rng(1)) for _ in range(2))
    assert list(islice(first, 5)) == list(islice(again, 9000))[:5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "from 1 to 10,000,000"),
        ("1.5", "whole number"),
        ("1e9", "from 1 to 10,000,000"),
        ("-3", "is not a known distribution"),
        ("", "is not a known distribution"),
        ("zeta:2", "use N, uniform:A-B"),
        ("uniform:9", "two numbers"),
        ("uniform:9-5", "above the upper bound"),
        ("normal:9", "two numbers"),
        ("normal:9,-1", "the standard deviation is -1"),
        ("lognormal:9,inf", "sigma is inf"),
        ("empirical:1,x", "`x` is not a number"),
        ("100|9", "two numbers"),
    ],
)
def test_invalid_lengths_are_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(LoadTestError, match="length") as error:
        Lengths(text)
    assert says in str(error.value)


def test_the_vocabulary_has_no_word_twice_and_is_plain_ascii() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) > 500
    assert all(word.isascii() and word.isalpha() and word.islower() for word in VOCABULARY)


def test_word_frequencies_are_zipf_distributed() -> None:
    text = words().passage(3, 60_000).split()
    counts = Counter(text)
    harmonic = sum(1 / rank for rank in range(1, len(VOCABULARY) + 1))
    for rank in (1, 2, 5, 20, 100):
        expected = len(text) / harmonic / rank
        assert abs(counts[VOCABULARY[rank - 1]] - expected) < 5 * np.sqrt(expected)
    assert len(" ".join(text)) / len(text) == pytest.approx(CHARACTERS_PER_TOKEN, rel=0.01)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5])
def test_ranks_fall_with_their_power(exponent: float) -> None:
    counts = np.bincount(zipf_ranks(np.random.default_rng(1), 10, exponent, 100_000), minlength=10)
    np.testing.assert_allclose(counts / counts[0], np.arange(1, 11) ** -exponent, rtol=0.08)


@pytest.mark.parametrize("characters_per_token", [1.0, 3.7, 4.4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 512, 40_001])
def test_a_text_has_its_number_of_characters_and_no_blank_at_its_ends(
    characters_per_token: float, num_tokens: int
) -> None:
    """So a server that takes a byte for a token counts exactly what was asked for."""
    source = words(characters_per_token)
    for key in range(40):
        text = source.passage(key, num_tokens)
        assert len(text.encode()) == round(num_tokens * characters_per_token) == len(text.strip())
        assert "  " not in text
        assert source.num_tokens(text) == num_tokens
        assert len(source.beginning(key, num_tokens)) == len(text)


def test_a_text_longer_than_all_that_was_drawn_has_its_length_too() -> None:
    assert len(words(1.0).passage(1, 3_000_000)) == 3_000_000


def test_no_two_passages_begin_alike_and_each_is_the_same_again() -> None:
    source, again, other = words(), words(), words(seed=1)
    keys = [*range(10_000), 2**26, 2**63]
    beginnings = Counter(source.passage(key, 16)[:40] for key in keys)
    assert len(beginnings) == len(keys)
    assert [again.passage(key, 16) for key in keys] == [source.passage(key, 16) for key in keys]
    for key in range(2000):
        assert source.passage(key, 64).split()[0] != source.passage(key + 1, 64).split()[0]
    same = [key for key in range(100) if source.passage(key, 64).split()[0] == other.passage(key, 64).split()[0]]
    assert len(same) < 5, "another seed says other words"


def test_queries_have_3_to_15_words_and_most_about_6() -> None:
    lengths = np.array([len(query.split()) for query in islice(queries(np.random.default_rng(0)), 30_000)])
    assert lengths.min() >= 3 and lengths.max() <= 15
    assert np.mean(lengths) == pytest.approx(6, abs=0.25)
    assert np.mean((lengths >= 4) & (lengths <= 8)) > 0.75


def test_queries_are_complete_and_popular_ones_repeat() -> None:
    some = list(islice(queries(np.random.default_rng(0)), 10_000))
    assert all("{" not in query and "|" not in query and query == " ".join(query.split()) for query in some)
    assert 5_000 < len(set(some)) < 10_000


def test_random_prompts_have_the_lengths_that_were_asked_for() -> None:
    asked = requests("random:input=uniform:20-30,output=lognormal:50,0.5|10-90", 3000, characters_per_token=1.0)
    assert {len(each.prompt) for each in asked} == set(range(20, 31))
    assert {each.max_tokens for each in asked} <= set(range(10, 91))
    assert np.median([each.max_tokens for each in asked]) == pytest.approx(50, rel=0.05)


def test_another_output_length_leaves_the_prompts() -> None:
    short, long = (requests(f"random:input=normal:90,9,output={each}", 50) for each in ("5", "uniform:5-50"))
    assert [each.prompt for each in short] == [each.prompt for each in long]


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    asked = requests("prefix:groups=5,prefix=200,suffix=40,output=9", 2000, characters_per_token=1.0)
    groups: dict[int | None, list[str]] = {}
    for each in asked:
        groups.setdefault(each.group, []).append(each.prompt)
    assert set(groups) == set(range(5))
    assert {len(each.prompt) for each in asked} == {240}
    for prompts in groups.values():
        assert len({prompt[:200] for prompt in prompts}) == 1 and prompts[0][199] == "\n"
        assert len({prompt[200:] for prompt in prompts}) == len(prompts)
    beginnings = {prompts[0][:16] for prompts in groups.values()}
    assert len(beginnings) == 5 and not beginnings & {each.prompt[200:216] for each in asked}


def test_group_popularity_is_zipf_distributed() -> None:
    for exponent in (0.0, 1.1):
        asked = requests(f"prefix:groups=8,prefix=9,suffix=9,zipf={exponent}", 20_000)
        counts = np.array([Counter(each.group for each in asked)[group] for group in range(8)])
        weights = np.arange(1, 9) ** -exponent
        np.testing.assert_allclose(counts, 20_000 * weights / weights.sum(), rtol=0.08)


def test_later_turns_follow_the_one_before_after_a_pause() -> None:
    plan = make_plan("poisson:10", "conversation:turns=4,input=12,output=7,think=3", num_requests=8000, seed=5)
    for each in plan.requests:
        if each.index % 4 == 0:
            assert each.follows is None and each.intended_s is not None and each.think_s == 0
        else:
            assert each.follows == each.index - 1 and each.intended_s is None
    pauses_s = np.array([each.think_s for each in plan.requests if each.follows is not None])
    assert np.mean(pauses_s) == pytest.approx(3, rel=0.05) and np.var(pauses_s) == pytest.approx(9, rel=0.1)
    assert len({each.prompt for each in plan.requests}) == 8000


def test_the_number_of_turns_is_drawn_and_the_last_conversation_is_cut_short() -> None:
    asked = requests("conversation:turns=uniform:1-3", 3001)
    assert len(asked) == 3001
    heads = [each.index for each in asked if each.follows is None]
    lengths = Counter(np.diff(heads).tolist())
    assert set(lengths) == {1, 2, 3} and min(lengths.values()) > 400
    assert len(requests("conversation:turns=9", 4)) == 4


def test_a_document_comes_before_a_question_that_names_words_of_it() -> None:
    for each in requests("documents:document=3000,output=20", 20, characters_per_token=1.0):
        document, _, question = each.prompt.partition("\n\n")
        assert len(document) == 3000
        about = question.removeprefix("What does the text above say about ").removesuffix("?").split(" and ")
        assert len(about) == 2 and set(about) <= set(document.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("query", "is unknown; use queries, random, prefix, conversation, documents"),
        ("random:512", "`512` is not of the form name=value; random takes input, output"),
        ("random:inptu=512", "unknown field `inptu`"),
        ("random:input=1,input=2", "`input` is given twice"),
        ("random:input=few", "is not a known distribution"),
        ("prefix:groups=0", ">= 1"),
        ("prefix:zipf=nan", ">= 0"),
        ("conversation:think=-1", ">= 0"),
    ],
)
def test_invalid_workloads_are_refused_with_the_valid_ones(text: str, says: str) -> None:
    with pytest.raises(LoadTestError) as error:
        parse_workload(text)
    assert says in str(error.value)
