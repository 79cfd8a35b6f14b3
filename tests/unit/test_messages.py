"""Claims about what goes over the wire."""

from __future__ import annotations

import msgspec

from servekit.messages import Row, Seat, StepPlan, ToWorker
from servekit.sampling_params import SamplingParams


def seat(slot: int, grammar: str | None) -> Seat:
    return Seat(slot, SamplingParams(max_tokens=5, seed=slot, grammar=grammar), prompt_length=3)


def test_a_grammar_travels_once_and_arrives_with_every_seat() -> None:
    grammars = ["a" * 10_000, None, "b" * 10_000, "a" * 10_000, "a" * 10_000]
    plan = StepPlan(
        0, 1, tuple(seat(slot, text) for slot, text in enumerate(grammars)), (Row(0, 0, 1, (5,), (), True),)
    )
    sent = msgspec.msgpack.encode(plan.with_grammars_apart())
    assert len(sent) < 21_000
    arrived = msgspec.msgpack.decode(sent, type=ToWorker)
    assert isinstance(arrived, StepPlan) and arrived.with_grammars_back() == plan


def test_a_plan_without_grammars_is_sent_as_it_is() -> None:
    plan = StepPlan(0, 1, (seat(0, None),), ())
    assert plan.with_grammars_apart() is plan and plan.with_grammars_back() is plan
