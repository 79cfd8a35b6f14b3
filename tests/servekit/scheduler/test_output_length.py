"""Claims about predicted output lengths and the peak of memory that follows from them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.output_length import OutputLengthPredictor, future_peak
from servekit.scheduler.sequence import Sequence

demands = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def peak_by_playing_it(pairs: list[tuple[int, int]], block_size: int) -> int:
    """Grow all of them step by step, and measure."""
    longest = max((to_come for _, to_come in pairs), default=0)
    return max(
        (
            sum(-(-(held + step) // block_size) for held, to_come in pairs if step <= to_come)
            for step in range(longest + 1)
        ),
        default=0,
    )


@given(demands)
def test_the_peak_is_exact_for_blocks_of_one_token(pairs: list[tuple[int, int]]) -> None:
    assert future_peak(pairs, 1) == peak_by_playing_it(pairs, 1)


@given(demands, st.integers(2, 16))
def test_the_peak_is_too_high_by_less_than_a_block_per_sequence_and_never_too_low(
    pairs: list[tuple[int, int]], block_size: int
) -> None:
    truth, bound = peak_by_playing_it(pairs, block_size), future_peak(pairs, block_size)
    assert truth <= bound <= truth + len(pairs)


def test_the_peak_is_far_below_the_sum_of_what_each_may_need() -> None:
    staggered = [(100 - to_come, to_come) for to_come in range(0, 100, 10)]
    assert future_peak(staggered, 1) < 10 * 100 * 0.6


def make_sequence(num_outputs: int = 0, max_tokens: int = 1000, has_length_bound: bool = False) -> Sequence:
    sequence = Sequence(0, [1] * 10, SamplingParams(max_tokens=max_tokens), has_length_bound=has_length_bound)
    sequence.token_ids.extend([2] * num_outputs)
    return sequence


def test_a_length_bound_is_the_prediction() -> None:
    predictor = OutputLengthPredictor(16)
    assert predictor.tokens_to_come(make_sequence(0, 50, has_length_bound=True)) == 49
    assert predictor.tokens_to_come(make_sequence(50, 50, has_length_bound=True)) == 0


def test_an_unbounded_answer_is_predicted_as_long_as_recent_ones() -> None:
    predictor = OutputLengthPredictor(16)
    assert predictor.tokens_to_come(make_sequence()) == 16, "knowing nothing, the next block"
    for _ in range(150):
        predictor.record_end(make_sequence(100))
        predictor.record_end(make_sequence(300))
    assert predictor.tokens_to_come(make_sequence()) == 200
    assert predictor.tokens_to_come(make_sequence(50)) == 150
    assert predictor.tokens_to_come(make_sequence(120)) == 180, "longer than the short ones: it is one of the long"
    assert predictor.tokens_to_come(make_sequence(400)) == 16, "longer than all others: the next block"
    assert predictor.tokens_to_come(make_sequence(0, max_tokens=30)) == 29, "never more than it may have"


def test_a_preemption_doubles_predictions_and_ends_reduce_them() -> None:
    predictor = OutputLengthPredictor(16)
    predictor.record_preemption()
    assert predictor.tokens_to_come(make_sequence()) == 32
    for _ in range(10):
        predictor.record_preemption()
    assert predictor.safety_factor == OutputLengthPredictor.MAX_SAFETY_FACTOR
    for _ in range(300):
        predictor.record_end(make_sequence(16, has_length_bound=True))
    assert predictor.tokens_to_come(make_sequence()) == 16
