"""Short form of the part `batches` of `make torture`."""

from __future__ import annotations

import pytest

from tests.torture import batches
from tests.torture.report import BUILD

pytestmark = pytest.mark.long


@pytest.mark.parametrize("api_processes", [1, 2])
def test_each_line_of_a_batch_is_answered_once_although_the_server_is_killed_twice(api_processes: int) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    findings = batches.run(1500, api_processes=api_processes)
    assert [finding for finding in findings if finding.is_kept is False] == []
