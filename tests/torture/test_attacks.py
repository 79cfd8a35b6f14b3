"""Short form of the attacks of `make torture`: a few seconds each, without the claims about latency."""

from __future__ import annotations

from random import Random

import pytest

from tests.torture.attacks.catalogue import ATTACKS, SCENARIOS
from tests.torture.attacks.claims import Claim
from tests.torture.attacks.windows import beside_bystander

pytestmark = pytest.mark.long


def missed(claims: list[Claim]) -> list[Claim]:
    """Return the claims that do not hold, but for those that a busy machine may miss."""
    return [claim for claim in claims if claim.is_kept is False and not claim.is_timed]


@pytest.mark.parametrize("name", ["overlapping-terminals", "bodies", "mix"])
def test_a_bystander_gets_all_answers_beside_an_attack(name: str) -> None:
    claims = beside_bystander(ATTACKS[name], seconds=3, seed=0, num_rounds=1, control_s=0.5)
    assert any(claim.is_kept for claim in claims) and not missed(claims)


MODEST = ["modest-tenant", "modest-images", "modest-remote", "modest-adapter", "own-batch"]


@pytest.mark.parametrize("name", [*MODEST, "upgrade", "stopped-sandbox", "unread-log"])
def test_a_scenario_leaves_others_alone(name: str) -> None:
    claims = SCENARIOS[name].run(1.0, Random(0))
    assert any(claim.is_kept for claim in claims) and not missed(claims)
