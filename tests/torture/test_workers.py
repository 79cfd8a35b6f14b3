"""The short form of what `make torture` does to workers: each fault once, under sixteen streams."""

from __future__ import annotations

from pathlib import Path

from tests.torture import workers
from tests.torture.crowd import Crowd, References, requests

NUM_CLIENTS = 16
SLOW = workers.Fault("slow worker", workers.planted("sleep 1 s"), is_fatal=False)
FAULTS = [SLOW if fault.name == SLOW.name else fault for fault in workers.FAULTS]


async def test_nine_faults_of_a_worker_and_no_client_notices_more_than_a_pause(tmp_path: Path) -> None:
    """What was asked is answered token for token, and at the end nothing is left over."""
    wounds, references = workers.Wounds(), References()
    with workers.tortured("roomy", tmp_path / "log", "--heartbeat-timeout", "1") as server:
        await references.take(server.port, requests(2048, num_each=4))
        crowd = Crowd(server.port, references, NUM_CLIENTS, seed=0)
        torturer = workers.Torturer(server, crowd, seed=0, most_patience_s=0.3)
        await torturer.begin()
        for fault in FAULTS:
            await torturer.strike(fault, "streaming", wounds)
        await torturer.check_at_rest(wounds, "at the end")
        await crowd.stop()
    assert wounds.violations == []
    assert crowd.tally.examples == []
    assert crowd.tally.num_asked > NUM_CLIENTS
