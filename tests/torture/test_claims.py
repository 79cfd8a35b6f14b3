"""What the attacks report of what was not tried, and of what happened once."""

from __future__ import annotations

import pytest

from tests.torture.attacks.bodies import MAX_HOLD_S, Holds
from tests.torture.attacks.callback_times import Hold
from tests.torture.attacks.claims import Claim, finding
from tests.torture.attacks.connections import answered


@pytest.mark.parametrize(
    ("statuses", "is_kept"), [(["200", "200"], True), (["200", "400"], False), ([], None), (["000"], False)]
)
def test_a_client_that_is_not_installed_is_neither_kept_nor_missed(statuses: list[str], is_kept: bool | None) -> None:
    claim = answered("Java", statuses)
    assert claim.is_kept is is_kept
    assert ("not run" in claim.measured) == (is_kept is None)


def test_one_missed_claim_is_a_missed_finding_and_says_which() -> None:
    claims = [Claim("a", "1", True), Claim("b", "2", False), Claim("c", "3")]
    assert finding("x", claims).is_kept is False and "missed: 2" in finding("x", claims).measured
    assert finding("x", [*claims[:1], *claims[2:]]).is_kept


def test_a_long_callback_counts_if_the_body_causes_it_again() -> None:
    short, long = Hold(0.8 * MAX_HOLD_S, 1.0, "a"), Hold(1.2 * MAX_HOLD_S, 1.0, "b")
    assert not Holds([short, short]).is_too_long
    assert Holds([short, long]).is_too_long and Holds([short, long], [long, short]).is_too_long
    once = Holds([short, long], [short, short])
    assert not once.is_too_long and once.longest is long and once.summary == "12.0 8.0 8.0 8.0"
