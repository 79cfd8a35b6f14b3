"""Short form of the client parts of `make torture`: every fault a few times, and some mutated requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server_process import ServerProcess, serving
from tests.torture import clients, raw_http
from tests.torture.hostile_clients import FAULTS
from tests.torture.report import Finding

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(*clients.FLAGS, log=tmp_path_factory.mktemp("torture") / "log") as server:
        yield server


def missed(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.is_kept is False]


def test_hostile_clients_do_not_affect_other_clients(server: ServerProcess) -> None:
    findings, _ = clients.torture(server, ",".join(FAULTS), times=3)
    assert not missed(findings) and len(findings) == 5


def test_at_most_two_steps_are_computed_after_a_disconnect(server: ServerProcess) -> None:
    assert not missed(clients.steps_after_disconnect(server, times=7))


def test_mutated_requests_are_refused_or_answered(server: ServerProcess) -> None:
    assert not missed(raw_http.torture(server, cases=500))
