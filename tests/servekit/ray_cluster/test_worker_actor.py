"""The actor that owns a worker, without Ray."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from servekit.protocol.placement_job import PlacementJob
from servekit.ray_cluster.worker_actor import PORTS, NodeShare, WorkerActor
from tests.support import proc

JOB = PlacementJob(
    cluster_address=None,
    listen_address="unix:/nowhere/workers.sock",
    key="0123456789abcdef" * 4,
    tls_ca=None,
    model="sim:step=1ms",
    device="cpu",
    num_ranks=1,
    cpus_per_rank=1,
    num_workers=1,
    log_level="info",
    log_format="text",
)
ENOUGH_S = 60.0


def workers_of(pid: int) -> list[int]:
    return [child for child in proc.children(pid) if "servekit.worker" in proc.read(child, "cmdline")]


async def test_a_worker_runs_until_it_is_asked_to_leave_and_its_key_is_in_no_command_line() -> None:
    actor = WorkerActor(JOB, "10.0.0.7, Ray node 12345678")
    running = asyncio.create_task(actor.run())
    async with asyncio.timeout(ENOUGH_S):
        while not actor.last_line:  # noqa: ASYNC110  # until it tries to join
            await asyncio.sleep(0.05)
        assert actor.process is not None
        command = proc.read(actor.process.pid, "cmdline")
        assert JOB.key not in command and "--node\x0010.0.0.7, Ray node 12345678" in command
        await actor.leave()
        code, last_line = await running
    assert code == 0 and "cannot join unix:/nowhere/workers.sock" in last_line


async def test_a_worker_that_is_asked_to_leave_before_it_was_started_is_not_started() -> None:
    actor = WorkerActor(JOB, "node")
    await actor.leave()
    code, last_line = await asyncio.wait_for(actor.run(), ENOUGH_S)
    assert code == 0 and "asked to leave" in last_line and actor.process is None


async def test_a_worker_that_cannot_serve_says_why() -> None:
    actor = WorkerActor(replace(JOB, key="short"), "node")
    code, last_line = await actor.run()
    assert code == 2 and "the key has 5 bytes, and must have 32 to 4096" in last_line


async def test_the_share_of_one_node_is_told_which_one_it_is_and_where_the_ranks_meet() -> None:
    actor = WorkerActor(replace(JOB, num_ranks=4, num_nodes=2), "node")
    port = await actor.free_port("127.0.0.1")
    assert port in PORTS
    with socket.create_server(("127.0.0.1", port)):
        assert await actor.free_port("127.0.0.1") != port
    running = asyncio.create_task(actor.run(NodeShare(1, "10.0.0.7", port)))
    async with asyncio.timeout(ENOUGH_S):
        while not actor.last_line:  # noqa: ASYNC110  # until it tries to join
            await asyncio.sleep(0.05)
        assert actor.process is not None
        command = " ".join(proc.read(actor.process.pid, "cmdline").split("\0"))
        await actor.leave()
        code, _ = await running
    assert f"--nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr 10.0.0.7 --master-port {port}" in command
    assert code == 0


def test_a_worker_ends_with_the_process_of_its_actor(tmp_path: Path) -> None:
    program = (
        "import asyncio\n"
        "from servekit.ray_cluster.worker_actor import WorkerActor\n"
        "from tests.servekit.ray_cluster.test_worker_actor import JOB\n"
        "asyncio.run(WorkerActor(JOB, 'node').run())\n"
    )
    with (tmp_path / "log").open("wb") as log:
        owner = subprocess.Popen([sys.executable, "-c", program], stderr=log)
    deadline = time.monotonic() + ENOUGH_S
    while not (found := workers_of(owner.pid)) or "cannot join" not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    proc.wait_until_gone(*found)
