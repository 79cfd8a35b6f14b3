"""Claims about the lengths that simulated answers get."""

from __future__ import annotations

from array import array
from itertools import pairwise
from statistics import pstdev

from servekit.latency.answer_lengths import AnswerLengths
from servekit.latency.latency_model import LatencyModel, StepWork
from servekit.latency.roll_forward import RollForward
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.checkpoint import save_manager
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager

NUM_SEQUENCES = 40
STEP_S = 0.01


def ends(num_draws: int) -> list[list[float]]:
    """For each draw, when each of NUM_SEQUENCES ends that all begin at once. Earlier answers had 1 to 100 tokens."""
    manager = WorkloadManager(
        SchedulerConfig(
            num_blocks=1024,
            block_size=16,
            max_model_len=512,
            max_num_seqs=NUM_SEQUENCES,
            max_num_batched_tokens=1024,
            max_steps_in_flight=1,
        )
    )
    model, lengths = LatencyModel(), AnswerLengths()
    model.observe(StepWork(0, 0.0, 1, 1), STEP_S)
    for length in range(1, 101):
        lengths.record(length, False)
    for number in range(NUM_SEQUENCES):
        manager.add(
            AddSequence(
                sequence_id=number,
                prompt_token_ids=array("i", range(10 * number, 10 * number + 10)),
                sampling=SamplingParams(max_tokens=200),
                arrival_s=0.0,
            )
        )
    manager.plan(0.0)
    state, played = save_manager(manager), []
    for draw in range(num_draws):
        roll = RollForward(manager.config, state, model, lengths, 0.0, [STEP_S], draw)
        while roll.step():
            pass
        played.append([roll.ends_s[number] for number in range(NUM_SEQUENCES)])
    return played


def test_lengths_of_several_draws_are_spread_evenly_over_those_that_an_answer_may_have() -> None:
    played = ends(5)
    of_one_draw = sum(pstdev(each) for each in played) / 5
    of_means = pstdev([sum(each) / 5 for each in zip(*played, strict=True)])
    assert of_means < 0.33 * of_one_draw  # it would be 0.45 of it if draws were independent


def test_lengths_of_neighbours_have_nothing_to_do_with_each_other() -> None:
    for each in ends(5):
        mean, deviation = sum(each) / NUM_SEQUENCES, pstdev(each)
        neighbours = sum((one - mean) * (other - mean) for one, other in pairwise(each))
        assert abs(neighbours) / (NUM_SEQUENCES - 1) < 0.3 * deviation**2
        assert deviation > 0.7 * pstdev(STEP_S * length for length in range(1, 101))
