"""Short form of the worker part of `make torture`: each fault once, under sixteen streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import workers
from tests.torture.crowd import Crowd, References, requests

pytestmark = pytest.mark.long

NUM_CLIENTS = 16
SLOW = workers.Fault("slow worker", workers.planted("sleep 1 s"), is_fatal=False)
FAULTS = [SLOW if fault.name == SLOW.name else fault for fault in workers.FAULTS]


async def test_clients_notice_only_a_pause_when_workers_fail(tmp_path: Path) -> None:
    """All answers are right token for token, and the server returns to its initial state."""
    results, references = workers.FaultResults(), References()
    with workers.serving_with_faults(
        "roomy", tmp_path / "log", "--heartbeat-timeout", "2", "--load-timeout", "60"
    ) as server:
        await references.take(server.port, requests(2048, num_each=4))
        crowd = Crowd(server.port, references, NUM_CLIENTS, seed=0)
        injector = workers.FaultInjector(server, crowd, seed=0, max_delay_s=0.3)
        await injector.begin()
        for fault in FAULTS:
            await injector.inject(fault, "streaming", results)
        await injector.check_at_rest(results, "at the end")
        await crowd.stop()
    assert results.violations == []
    assert crowd.tally.examples == []
    assert crowd.tally.num_asked > NUM_CLIENTS
