"""Claims about which drafter the settings choose, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel, ScheduledChunk, SlotAssignment, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from servekit.protocol.speculative_config import SpeculativeConfig
from tests.support.load_settings import load_settings
from workers.runner.model_runner import load
from workers.speculation.choose import load_drafter
from workers.speculation.ngram import NgramDrafter

SETTINGS = load_settings(str(DEMO_MODEL_PATH), block_size=16, max_num_seqs=4)
NGRAM = SpeculativeConfig("ngram", max_drafts=4)


def chosen(settings: LoadModel) -> Any:
    return load_drafter(SimpleNamespace(), settings)  # type: ignore[arg-type]


def test_without_a_drafter_nothing_of_speculation_exists() -> None:
    assert chosen(SETTINGS) is None
    runner, _ = load(SETTINGS, lambda _: None)
    assert runner._speculator is None and runner._hidden_states is None


def test_prompt_lookup_is_chosen_by_its_name() -> None:
    assert isinstance(chosen(replace(SETTINGS, speculative=NGRAM)).make_drafter(None), NgramDrafter)


def test_unknown_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such drafter"):
        chosen(replace(SETTINGS, speculative=SpeculativeConfig("tarot", max_drafts=4)))


def test_worker_that_loads_with_prompt_lookup_answers_with_spans() -> None:
    """The prompt repeats itself, so the first guesses are the tokens that stood there before; most are accepted."""
    runner, _ = load(replace(SETTINGS, speculative=NGRAM), lambda _: None)
    prompt = (40, 41, 42, 43, 44, 45) * 5
    sampling = SamplingParams(max_tokens=20, temperature=0.0, allowed_token_ids=(40,))
    assignment = SlotAssignment(2, sampling, len(prompt))
    first = ScheduledChunk(2, 0, len(prompt), prompt, (7, 8, 9, 10), True)
    assert runner.execute(StepPlan(0, 0, (assignment,), (first,))).token_ids == (40,)
    # The tokens come to be 40, 40, 40: from the third step on this is what stood there before.
    num_tokens, counts = len(prompt) + 1, []
    while num_tokens < len(prompt) + 16:
        chunk = ScheduledChunk(2, num_tokens - 1, 5, (), (), True, 4)
        result = runner.execute(StepPlan(0, len(counts) + 1, (), (chunk,)))
        assert set(result.token_ids) == {40}
        counts.append(len(result.token_ids))
        assert result.counts == ((counts[-1],) if counts[-1] > 1 else ())
        num_tokens += counts[-1]
    assert counts[-1] == 5
