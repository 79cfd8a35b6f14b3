"""Short form of the parts `joins` and `failover` of `make torture`."""

from __future__ import annotations

import pytest

from tests.torture import failover, joins
from tests.torture.report import BUILD

pytestmark = pytest.mark.long


def test_no_answer_changes_while_workers_join_leave_die_and_lie() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    findings = joins.run(0.5)
    assert [finding for finding in findings if finding.is_kept is False] == []


def test_no_stream_changes_when_one_of_two_joined_workers_is_killed() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    findings = failover.run(1)
    lost = [finding for finding in findings if "lost or altered" in finding.what]
    assert len(lost) == 2 and all(finding.is_kept for finding in lost)
