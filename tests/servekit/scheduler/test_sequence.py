"""Claims about one sequence."""

from __future__ import annotations

import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence import Sequence


def test_the_repr_of_a_sequence_shows_its_state() -> None:
    sequence = Sequence(3, [1, 2, 3], SamplingParams(max_tokens=4))
    assert repr(sequence) == "<Sequence 3 waiting 3+0/4 tokens, computed 0, pending 0>"


def test_a_fork_has_its_leaders_prompt_and_tenant() -> None:
    leader = Sequence(0, [1, 2], SamplingParams(max_tokens=4), tenant="a")
    with pytest.raises(AssertionError, match="share the prompt"):
        Sequence(1, [1, 3], SamplingParams(max_tokens=4), tenant="a", leader=leader)
    with pytest.raises(AssertionError, match="same request"):
        Sequence(1, [1, 2], SamplingParams(max_tokens=4), tenant="b", leader=leader)
