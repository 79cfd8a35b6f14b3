"""Claims about predicted output lengths."""

from __future__ import annotations

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.sequence import Sequence


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
