"""Test reading replies to several prompts."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.running.batch_reply import BatchAnswer, GarbledReply, read_batch
from servekit.api.schemas import native
from servekit.api.schemas.common_fields import Usage
from servekit.scheduler.sequence import FinishReason


def batch(texts: list[str], reasons: list[str], num_tokens: int) -> bytes:
    return msgspec.json.encode(
        native.BatchGenerateResponse(
            "gen-1",
            texts,
            [FinishReason(reason) for reason in reasons],
            [None] * len(texts),
            Usage(7, num_tokens, 9, 0),
        )
    )


def test_a_batch_is_one_answer_for_each_prompt() -> None:
    assert read_batch(batch(["ab", "c"], ["length", "stop"], 3), 2, max_tokens=2) == [
        BatchAnswer("ab", 2, 4, "length"),
        BatchAnswer("c", 1, 3, "stop"),
    ]


@pytest.mark.parametrize(
    ("reasons", "num_tokens", "dealt"),
    [
        (["length", "length", "length"], 12, [4, 4, 4]),
        (["stop", "length", "stop"], 9, [3, 4, 2]),
        (["stop", "stop", "stop"], 2, [1, 1, 0]),
        (["length", "length", "stop"], 8, [4, 4, 0]),
    ],
)
def test_tokens_of_a_batch_add_up_to_the_usage(reasons: list[str], num_tokens: int, dealt: list[int]) -> None:
    answers = read_batch(batch(["a", "b", "c"], reasons, num_tokens), 3, max_tokens=4)
    assert [answer.num_output_tokens for answer in answers] == dealt and sum(dealt) == num_tokens


@pytest.mark.parametrize(
    ("reasons", "num_tokens"),
    [(["length", "length"], 7), (["length", "length"], 9), (["length", "stop"], 3), (["stop", "stop"], 9)],
)
def test_a_batch_with_an_impossible_token_count_is_garbled(reasons: list[str], num_tokens: int) -> None:
    with pytest.raises(GarbledReply, match="a number of tokens that such answers cannot have"):
        read_batch(batch(["a", "b"], reasons, num_tokens), 2, max_tokens=4)


def test_a_batch_with_an_answer_too_few_is_garbled() -> None:
    with pytest.raises(GarbledReply, match="the number of answers differs from the number of prompts"):
        read_batch(batch(["a"], ["stop"], 1), 2, 4)
    with pytest.raises(GarbledReply, match="not the expected JSON"):
        read_batch(b"{", 2, 4)
