"""Short form of the part `rolling` of `make torture`."""

from __future__ import annotations

import pytest

from tests.torture import rolling
from tests.torture.report import BUILD

pytestmark = pytest.mark.long

RESTARTS = 2


def test_each_request_is_answered_while_servers_that_share_a_port_are_replaced() -> None:
    """Under clients that keep their connections, and clients that open new ones."""
    BUILD.mkdir(parents=True, exist_ok=True)
    findings = rolling.run(RESTARTS)
    answered = [finding for finding in findings if finding.demanded == "only 200"]
    assert len(answered) == len(rolling.KINDS)
    assert [finding for finding in answered if not finding.is_kept] == []
    assert all("200 " in finding.measured for finding in answered), "each kind of client had answers"
