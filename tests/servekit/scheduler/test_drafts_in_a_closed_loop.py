"""The claim that drafts cost next to nothing where they do not pay, with clients that ask again after each answer."""

from __future__ import annotations

import pytest

from servekit.scheduler.draft_length import MIN_GAIN_TO_BEGIN, DraftLengths
from tests.support.closed_loop import MAX_DRAFTS, Device, play
from tests.support.drafters import FixedDraftLengths

DEVICES = {
    # The demo model and its draft model on two cores of a CPU.
    "CPU": Device(2.4e-3, 0, 0.22e-3, round_s=0.25e-3, row_s=0.05e-3, computed_s=40e-6),
    # A step waits for memory up to eight positions, and for arithmetic from there on.
    "knee": Device(5e-3, 8, 0.3e-3, round_s=0.3e-3, row_s=0.02e-3, computed_s=20e-6),
    "slow drafter": Device(5e-3, 8, 0.1e-3, round_s=6e-3, row_s=0.1e-3, computed_s=60e-6),
    "n-grams": Device(5e-3, 8, 0.3e-3),
    "free positions": Device(5e-3, 1000, 0.0, round_s=0.3e-3, row_s=0.02e-3, computed_s=5e-6),
}
LOADS = (1, 4, 8, 32)
ACCEPTANCES = (0.0, 0.3, 0.6, 0.9)
LEAST = 0.97  # of the tokens a second without drafts
# Where the best fixed number of drafts gives less than so many times the tokens without drafts, drafts may never begin.
CLEAR_GAIN = MIN_GAIN_TO_BEGIN
LEAST_OF_BEST = 0.85


def tokens_per_s(device: Device, num_clients: int, acceptance: float, lengths: DraftLengths | None) -> float:
    num_tokens = 4_000 if num_clients < 32 else 10_000
    return play(device, num_clients, acceptance, lengths, num_tokens=num_tokens).tokens_per_s


def check(device: Device, num_clients: int, acceptance: float) -> None:
    plain, found, *fixed = (
        tokens_per_s(device, num_clients, acceptance, lengths)
        for lengths in (
            None,
            DraftLengths(MAX_DRAFTS),
            *(FixedDraftLengths(MAX_DRAFTS, lambda _, number=number: number) for number in (1, 2, MAX_DRAFTS)),
        )
    )
    assert found > LEAST * plain, f"{found / plain:.3f} of the tokens without drafts"
    if max(fixed) > CLEAR_GAIN * plain:
        assert found > LEAST_OF_BEST * max(fixed), f"{found / max(fixed):.3f} of the tokens with the best number"


@pytest.mark.parametrize(("num_clients", "acceptance"), [(1, 0.9), (4, 0.3), (8, 0.0)])
def test_with_the_demo_model_drafts_pay_or_cost_next_to_nothing(num_clients: int, acceptance: float) -> None:
    check(DEVICES["CPU"], num_clients, acceptance)


@pytest.mark.long
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("num_clients", LOADS)
@pytest.mark.parametrize("device", DEVICES)
def test_on_any_device_drafts_pay_or_cost_next_to_nothing(device: str, num_clients: int, acceptance: float) -> None:
    check(DEVICES[device], num_clients, acceptance)
