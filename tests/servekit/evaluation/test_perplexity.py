"""Claims about windows and perplexity. tests/e2e/test_evaluation.py compares them with transformers."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ConfigError
from servekit.evaluation.perplexity import (
    TextScore,
    TokenScore,
    parse_documents,
    perplexity_ratio,
    same_likeliest,
    windows,
)


@given(st.integers(1, 400), st.integers(1, 60), st.data())
def test_each_token_counts_once_in_a_window_that_is_not_too_long(num: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    found = windows(num, length, stride)
    assert [token for window in found for token in range(window.scored_from, window.end)] == list(range(num))
    for window in found:
        assert 0 <= window.begin <= window.scored_from < window.end <= window.begin + length
        # After the first window, each token has at least this many others before it.
        assert window.begin == 0 or window.scored_from - window.begin >= length - stride


def text_score(logprobs: list[float], num_bytes: int = 100) -> TextScore:
    return TextScore(list(range(len(logprobs))), [TokenScore(logprob, None) for logprob in logprobs], num_bytes)


def test_the_perplexity_of_a_uniform_model_is_the_size_of_its_vocabulary() -> None:
    score = text_score([-log(50)] * 40, num_bytes=80)
    perplexity = score.perplexity
    assert [perplexity.low, perplexity.estimate, perplexity.high] == pytest.approx([50.0] * 3)
    assert score.bits_per_byte == pytest.approx(40 * log(50) / log(2) / 80)


def test_a_constant_difference_of_losses_gives_a_ratio_without_uncertainty() -> None:
    logprobs = [-float(number % 7) for number in range(100)]
    ratio = perplexity_ratio(text_score([each - 0.01 for each in logprobs]), text_score(logprobs))
    assert [ratio.low, ratio.estimate, ratio.high] == pytest.approx([exp(0.01)] * 3)
    same = perplexity_ratio(text_score(logprobs), text_score(logprobs))
    assert (same.estimate, same.low, same.high) == (1.0, 1.0, 1.0)


def test_the_share_of_equal_likeliest_tokens_is_unknown_without_them() -> None:
    first = [TokenScore(-1.0, "a"), TokenScore(-1.0, "b"), TokenScore(-1.0, None)]
    second = [TokenScore(-1.0, "a"), TokenScore(-1.0, "c"), TokenScore(-1.0, "d")]
    assert same_likeliest(first, second) == 0.5
    assert same_likeliest(first[2:], second[2:]) is None


def test_a_jsonl_file_has_a_document_on_each_line_and_other_files_are_one() -> None:
    lines = b'{"text": "one"}\n\n{"text": "two"}\n'
    assert parse_documents(lines, "text.jsonl") == ["one", "two"]
    assert parse_documents(lines, "text.txt") == [lines.decode()]
    with pytest.raises(ConfigError, match=r"text.jsonl, line 1: "):
        parse_documents(b'{"txt": "one"}', "text.jsonl")
    with pytest.raises(ConfigError, match="not UTF-8: byte 1"):
        parse_documents(b"a\xff", "text")
