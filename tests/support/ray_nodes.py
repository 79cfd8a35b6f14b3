"""A Ray cluster of several nodes on this machine, in a process of its own: Ray changes signals, logs and warnings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

# Small, because many of them run on a test machine.
OBJECT_STORE_BYTES = 80 * 2**20


class RayNodes:
    """`num_nodes` nodes of Ray, which end when this object is closed. Needs the package ray."""

    def __init__(self, num_nodes: int, num_cpus: int = 2) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_nodes", str(num_nodes), str(num_cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        )
        self.address: str
        self.head_id: str
        self.address, self.head_id = self._receive()

    def add(self) -> str:
        """Add a node, and return its id."""
        return str(self._ask("add"))

    def kill(self, node_id: str) -> None:
        """Kill the processes of a node, given the first digits of its id, without a farewell."""
        self._ask(f"kill {node_id}")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the process of the nodes ended with code {self._process.wait()}")


def main() -> None:
    """Run the nodes until standard input ends."""
    from ray.cluster_utils import Cluster

    num_nodes, num_cpus = map(int, sys.argv[1:])
    size = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    nodes = [cluster.head_node] + [cluster.add_node(**size) for _ in range(num_nodes - 1)]
    _answer((cluster.address, cluster.head_node.node_id))
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "add":
            nodes.append(cluster.add_node(**size))
            _answer(nodes[-1].node_id)
        else:
            node = next(node for node in nodes if node.node_id.startswith(argument))
            nodes.remove(node)
            cluster.remove_node(node, allow_graceful=False)
            _answer(None)
    cluster.shutdown()


def _answer(value: Any) -> None:
    print("answer", json.dumps(value), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
