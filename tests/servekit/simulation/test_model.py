"""Claims about `sim:SPEC`, and about the model that it serves, recomputed by hand."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from scripts import simulated_tokenizer
from servekit.errors import ConfigError
from servekit.protocol.messages import ScheduledChunk, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.model import PRESETS, SimulatedModel, parse_simulated
from servekit.simulation.worker import NaiveReference


def test_a_preset_may_be_changed_in_part() -> None:
    changed = parse_simulated("sim:h100-8b, load=0s,decode=.5us")
    assert changed.load_s == 0 and changed.decode_s == 5e-7 and changed.step_s == PRESETS["h100-8b"].step_s
    assert parse_simulated("sim:instant") == SimulatedModel() == parse_simulated("sim:step=0ms")


@pytest.mark.parametrize(
    "spec", ["", "h200", "step", "step=5", "step=-1ms", "speed=5ms", "step=5ms,h100-8b", "step=1e3ms", "step_s=5ms"]
)
def test_a_malformed_spec_is_refused_with_the_valid_names(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"h100-8b|step=5ms") as refused:
        parse_simulated(f"sim:{spec}")
    assert spec.split(",")[-1] in refused.value.message


def test_a_steps_duration_is_the_sum_of_its_parts() -> None:
    model = parse_simulated("sim:step=5ms,prefill=30us,decode=20us,context=1us")
    rows = (
        ScheduledChunk(0, 100, 1, (7,), (), True),
        ScheduledChunk(1, 0, 512, (), (), False),
        ScheduledChunk(2, 200, 1, (7,), (), True),
    )
    assert model.duration_s(StepPlan(1, 1, (), rows)) == pytest.approx(5e-3 + 3 * 20e-6 + 511 * 30e-6 + 300e-6)


def test_attention_takes_time_for_each_pair_of_tokens_in_chunks_of_several() -> None:
    """A chunk of 512 tokens behind 100 attends to 100 tokens and, on average, to half of its own."""
    rows = (ScheduledChunk(0, 300, 1, (7,), (), True), ScheduledChunk(1, 100, 512, (), (), False))
    assert SimulatedModel(attention_s=1e-9).duration_s(StepPlan(1, 1, (), rows)) == pytest.approx(512 * 356e-9)


def test_tokens_beyond_a_number_take_longer_whichever_sequence_they_belong_to() -> None:
    """100 tokens are 84 beyond 16 and 36 beyond 64; a prompt of 200 more has 44 beyond 256."""
    model = parse_simulated("sim:beyond16=2us,beyond64=3us,beyond256=5us")
    rows = (*(ScheduledChunk(slot, 9, 1, (7,), (), True) for slot in range(2)), ScheduledChunk(2, 0, 98, (), (), True))
    assert model.duration_s(StepPlan(1, 1, (), rows[:2])) == 0.0
    assert model.duration_s(StepPlan(1, 1, (), rows)) == pytest.approx(84 * 2e-6 + 36 * 3e-6)
    more = (*rows, ScheduledChunk(3, 0, 200, (), (), False))
    assert model.duration_s(StepPlan(1, 1, (), more)) == pytest.approx(284 * 2e-6 + 236 * 3e-6 + 44 * 5e-6)


def test_answers_match_the_formula_in_the_documentation() -> None:
    """By the rule of docs/simulated_model.md, written down once more."""
    tokens, states = list(b"hello"), []
    for _ in range(12):
        state = 0
        states = [state := (state * 6364136223846793005 + t + 1442695040888963407) % 2**40 for t in tokens]
        tokens.append(32 + sum(states) // 2**17 % 95)
    assert bytes(tokens[5:]) == b"<}!EoQqHXIBu"
    assert NaiveReference().output(b"hello", SamplingParams(max_tokens=12)) == tokens[5:]


def test_the_tokenizer_file_matches_the_script_that_makes_it() -> None:
    assert simulated_tokenizer.FILE.read_text() == simulated_tokenizer.text(), "the script writes it anew"
    assert Tokenizer.from_str(simulated_tokenizer.text()).encode("é ÿ\n").ids == list("é ÿ\n".encode())


def test_a_draft_takes_its_own_time_and_is_no_prompt_token() -> None:
    model = parse_simulated("sim:step=5ms,prefill=30us,draft=7us")
    verifying = ScheduledChunk(0, 100, 4, (7,), (), True, 3)
    assert model.duration_s(StepPlan(1, 1, (), (verifying,))) == pytest.approx(5e-3 + 3 * 7e-6)


def test_making_drafts_takes_time_for_the_sequence_with_most_of_them() -> None:
    rows = (ScheduledChunk(0, 9, 3, (7,), (), True, 2), ScheduledChunk(1, 9, 5, (7,), (), True, 4))
    assert SimulatedModel(drafting_s=1e-3).duration_s(StepPlan(1, 1, (), rows)) == pytest.approx(4e-3)


def test_without_times_for_tokens_a_prompt_takes_as_long_as_a_decode() -> None:
    prompt = ScheduledChunk(0, 0, 100, tuple(range(100)), (), True)
    assert parse_simulated("sim:step=5ms").duration_s(StepPlan(1, 1, (), (prompt,))) == 5e-3


@pytest.mark.parametrize("acceptance", [0.0, 0.25, 0.7, 1.0])
def test_each_draft_behind_accepted_ones_is_accepted_with_the_given_probability(acceptance: float) -> None:
    model, steps = parse_simulated(f"sim:instant,acceptance={acceptance}"), range(20_000)
    assert model == SimulatedModel(acceptance=acceptance)
    counts = [model.num_accepted(3, step, slot=5) for step in steps]
    for number in (1, 2, 3):
        assert sum(count >= number for count in counts) / len(counts) == pytest.approx(acceptance**number, abs=0.02)


@pytest.mark.parametrize("text", ["1.1", "-1", "5ms", ""])
def test_an_acceptance_that_is_no_probability_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="nor acceptance=NUMBER from 0 to 1"):
        parse_simulated(f"sim:acceptance={text}")
