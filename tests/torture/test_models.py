"""Short form of the part `models` of `make torture`."""

from __future__ import annotations

import pytest

from tests.torture import models
from tests.torture.report import BUILD

pytestmark = pytest.mark.long


def test_each_request_is_answered_right_while_models_come_and_go_and_workers_are_killed() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    findings = models.run(0.5)
    assert [finding for finding in findings if finding.is_kept is False] == []
