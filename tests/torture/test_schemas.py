"""The short form of the torture by schemas: a few requests for each endpoint that takes any."""

from __future__ import annotations

from tests.torture.report import table
from tests.torture.schemas import run


def test_every_answer_is_as_documented_whatever_is_asked() -> None:
    findings = run(20)
    assert len(findings) == 10, "each route that takes a body or a query, and the log"
    assert all(finding.is_kept for finding in findings), table(findings)
