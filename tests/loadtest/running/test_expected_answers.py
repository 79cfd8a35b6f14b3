"""Test the expected answers of the simulated model, against its definition in numpy's integers."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from loadtest.running.expected_answers import difference, expected_text


def by_definition(prompt: str, num_tokens: int) -> str:
    """Wrapping around at 2**64 and then taking the rest of 2**40, for the one divides the other."""
    tokens = list(prompt.encode())
    while len(tokens) < len(prompt.encode()) + num_tokens:
        state = np.uint64(0)
        states = []
        for token in tokens:
            with np.errstate(over="ignore"):
                state = state * np.uint64(6364136223846793005) + np.uint64(token) + np.uint64(1442695040888963407)
            state %= np.uint64(2**40)
            states.append(int(state))
        tokens.append(32 + (sum(states) // 2**17) % 95)
    return bytes(tokens[len(prompt.encode()) :]).decode()


def test_the_first_token_is_that_of_a_computation_by_hand() -> None:
    # s_0 = 97 + 1442695040888963407 = 1312123 * 2**40 + 545316635056, and 545316635056 = 4160435 * 2**17 + 98736;
    # 4160435 = 43794 * 95 + 5, so the token is 32 + 5.
    assert expected_text("a", 1) == "%"


@pytest.mark.parametrize("seed", range(20))
def test_expected_answers_follow_the_definition(seed: int) -> None:
    draws = random.Random(seed)
    prompt = "".join(draws.choice("ab ?é漢\U0001f600") for _ in range(draws.randint(0, 40)))
    num_tokens = draws.randint(0, 12)
    assert expected_text(prompt, num_tokens) == by_definition(prompt, num_tokens)


def test_an_answer_depends_on_every_byte_and_on_their_order() -> None:
    prompt = "what color is the sky?"
    variants = {prompt} | {prompt[:n] + "#" + prompt[n + 1 :] for n in range(len(prompt))} | {prompt[::-1]}
    assert len({expected_text(variant, 16) for variant in variants}) == len(variants)


def test_a_longer_answer_begins_as_the_shorter_one() -> None:
    assert expected_text("x", 50)[:20] == expected_text("x", 20)


def test_a_conversation_continues_on_its_own_history() -> None:
    answer = expected_text("hello", 10)
    assert expected_text("hello" + answer, 5) == expected_text("hello", 15)[10:]


def test_the_first_difference_is_reported() -> None:
    right = expected_text("prompt", 8)
    wrong = right[:3] + ("a" if right[3] != "a" else "b") + right[4:]
    assert difference("prompt", 8, right) is None
    assert difference("prompt", 8, wrong) == "differs from character 3 on"
    assert difference("prompt", 8, right[:5]) == "differs from character 5 on"
    assert difference("prompt", 8, right + "x") == "differs from character 8 on"


def test_a_hundred_thousand_answers_take_seconds() -> None:
    began_s = time.process_time()
    for number in range(1000):
        expected_text(f"how many legs has cat {number:06d}?", 32)
    assert (time.process_time() - began_s) * 102 < 10
