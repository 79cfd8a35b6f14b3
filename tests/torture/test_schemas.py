"""Short form of the schema part of `make torture`: a few requests for each endpoint with parameters."""

from __future__ import annotations

import pytest

from tests.torture.report import table
from tests.torture.schemas import run

pytestmark = pytest.mark.long


def test_answers_to_generated_requests_are_as_documented() -> None:
    findings = run(20)
    assert len(findings) >= 19, "each route with a body or a query, and the log"
    assert all(finding.is_kept for finding in findings), table(findings)
