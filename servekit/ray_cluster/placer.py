"""`python -m servekit.ray_cluster.placer`: the process that places a server's workers on a Ray cluster.

The server starts it, and writes what it wants as lines of JSON: a PlacementJob, and then SetNumWorkers. It ends with
the server, and the workers end with it, because Ray ends the actors of a driver that has gone.

Each worker has a placement group of one bundle with the resources of all its ranks. A bundle is on one node, so the
ranks are, too. The workers are spread: each is asked for on the node that has the fewest of them. If the server lets
the ranks of a worker be on several nodes, there is a bundle for each of these, with its share of the ranks, and Ray
packs the bundles on as few nodes as have room.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

import msgspec
from msgspec.structs import replace

from servekit.errors import ConfigError
from servekit.joining.address import TcpAddress, parse_address
from servekit.protocol.child_process import die_with_parent, ignore_signals
from servekit.protocol.logging import configure_logging
from servekit.protocol.placement_job import PlacementFailed, PlacementJob, SetNumWorkers
from servekit.ray_cluster.worker_actor import NodeShare, WorkerActor

log = logging.getLogger("servekit.ray")

CONNECT_TIMEOUT_S = 5.0
RESERVE_TIMEOUT_S = 30.0  # after which the log says that resources are missing
MIN_DELAY_S, MAX_DELAY_S = 0.5, 30.0  # before a worker is placed anew
STABLE_AFTER_S = 30.0  # a worker that ran for this long does not count as failed
# A worker that leaves finishes its steps within 25 s.
LEAVE_TIMEOUT_S = 30.0
PERMANENT = 2  # exit code of a worker that cannot serve until the operator has changed something


def main() -> int:
    """Place workers until the server closes standard input. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m servekit.ray_cluster.placer")
    parser.add_argument("--parent-pid", type=int, required=True)
    die_with_parent(parser.parse_args().parent_pid)
    ignore_signals()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlacementJob)
    configure_logging(job.log_level, job.log_format)
    try:
        cluster = Cluster(job)
    except ConfigError as error:
        report(error.message)
        return 2
    placer = Placer(cluster)
    placer.set_num_workers(job.num_workers)
    for line in sys.stdin.buffer:
        placer.set_num_workers(msgspec.json.decode(line, type=SetNumWorkers).num_workers)
    cluster.close()
    return 0


def report(message: str) -> None:
    """Tell the server what the operator must change."""
    sys.stdout.buffer.write(msgspec.json.encode(PlacementFailed(message)) + b"\n")
    sys.stdout.buffer.flush()


class Cluster:
    """The connection to Ray. Its methods may be called from several threads."""

    def __init__(self, job: PlacementJob) -> None:
        """Connect. Raises ConfigError."""
        import ray

        self._ray: Any = ray
        address = job.cluster_address or "auto"
        try:
            _check_address(address)
            ray.init(address=address, namespace="servekit", log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            what = str(error).partition("\n")[0]
            raise ConfigError(
                f"there is no Ray cluster at {address!r} that this machine is part of: {what}; start one with `ray "
                "start --head`, or with `ray start --address HEAD:6379` on a further machine, and name it with "
                "--ray-address"
            ) from None
        ignore_signals()  # again: Ray would exit at SIGTERM, and the server ends this process
        has_gpu = ray.cluster_resources().get("GPU", 0.0) > 0.0
        device = job.device if job.device != "auto" else "cuda" if has_gpu else "cpu"
        self.job = replace(job, device=device, listen_address=self._reachable(job.listen_address))
        num_ranks = job.num_ranks // job.num_nodes
        self.bundle = {"CPU": float(job.cpus_per_rank * num_ranks)}  # of one node
        if device == "cuda":
            self.bundle["GPU"] = float(num_ranks)
        self._lock = threading.Lock()
        self._num_workers: Counter[str | None] = Counter()  # by node id; None: not known yet
        log.info(
            "Ray cluster at %s: %d nodes; each worker gets %s, and joins at %s",
            *(
                ray.get_runtime_context().gcs_address,
                len(self._nodes()),
                self._describe_need("one node"),
                self.job.listen_address,
            ),
        )

    def close(self) -> None:
        """Leave the cluster, which ends the actors and removes the placement groups of this process."""
        self._ray.shutdown()

    def reserve(self, stopping: threading.Event) -> Reservation | None:
        """Wait for the resources of one worker. Returns None if `stopping` is set before there are any."""
        from ray.util.placement_group import placement_group, placement_group_table

        num_nodes = self.job.num_nodes
        reservation = Reservation(None, self._take_nodes(), [])
        # Ray can be asked for a certain node only where all bundles are on the same one.
        strategy: dict[str, Any] = {"strategy": "PACK"}
        if num_nodes == 1:
            strategy = {"strategy": "STRICT_PACK", "_soft_target_node_id": reservation.node_ids[0]}
        with contextlib.ExitStack() as undo:  # also if Ray raises: the resources would be lost until this process ends
            undo.callback(self.release, reservation)
            reservation.group = group = placement_group([self.bundle] * num_nodes, **strategy)
            if not self._wait_for(group, stopping):
                return None
            node_of_bundle: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
            found = [node_of_bundle[index] for index in range(num_nodes)]
            reservation.addresses = [self._address_of(node_id) for node_id in found]
            with self._lock:  # Ray may have chosen other nodes
                self._num_workers.subtract(reservation.node_ids)
                self._num_workers.update(found)
                reservation.node_ids = [*found]
            undo.pop_all()
        return reservation

    def _wait_for(self, group: Any, stopping: threading.Event) -> bool:
        """Wait until Ray has reserved a group. Returns False if `stopping` is set before."""
        began_s = logged_s = time.monotonic()
        while not group.wait(1):
            if stopping.is_set():
                return False
            if time.monotonic() - logged_s > RESERVE_TIMEOUT_S:
                logged_s = time.monotonic()
                log.warning(
                    "a worker has waited for %.0f s for %s that are free; add nodes, or lower --data-parallel-size; "
                    "the nodes have: %s",
                    *(logged_s - began_s, self._describe_need("a node"), self._describe_nodes()),
                )
        return True

    def release(self, reservation: Reservation) -> None:
        """Give resources back."""
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            self._num_workers.subtract(reservation.node_ids)
        if reservation.group is not None:
            remove_placement_group(reservation.group)

    def start_worker(self, reservation: Reservation) -> list[Any]:
        """Return the handles of actors that have the reserved resources, one for each bundle, and own a worker."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actors = []
        for index, node in enumerate(reservation.names()):
            actor = self._ray.remote(WorkerActor).options(
                num_cpus=self.bundle["CPU"],
                num_gpus=self.bundle.get("GPU", 0.0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    reservation.group, placement_group_bundle_index=index
                ),
            )
            actors.append(actor.remote(self.job, node))
        return actors

    def wait_for_end(self, actors: list[Any], reservation: Reservation) -> tuple[int | None, str]:
        """Run the worker of these actors until it ends, or its share on one of the nodes.

        Returns its exit code, None if an actor was lost, and why.
        """
        from ray.exceptions import RayError

        try:
            shares: list[NodeShare | None] = [None]
            if len(actors) > 1:
                address = reservation.addresses[0]
                port = self._ray.get(actors[0].free_port.remote(address))
                shares = [NodeShare(node_rank, address, port) for node_rank in range(len(actors))]
            running = [actor.run.remote(share) for actor, share in zip(actors, shares, strict=True)]
            ended, _ = self._ray.wait(running, num_returns=1)
            code, last_line = self._ray.get(ended[0])
        except RayError as error:
            return None, f"{type(error).__name__}: " + " ".join(str(error).split())[:300]
        return code, f"exit code {code}: {last_line}"

    def leave(self, actors: list[Any]) -> None:
        """Ask the worker of these actors to finish its steps and end."""
        for actor in actors:
            actor.leave.remote()

    def kill(self, actors: list[Any]) -> None:
        """End actors, and so their worker, at once."""
        for actor in actors:
            self._ray.kill(actor)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _take_nodes(self) -> list[str | None]:
        """Return the node with the fewest of our workers, of those that are large enough for one, and count one more.

        None if no node is large enough, and for each bundle of several: Ray chooses then.
        """
        with self._lock:
            if self.job.num_nodes > 1:
                self._num_workers[None] += self.job.num_nodes
                return [None] * self.job.num_nodes
            fitting = [
                node["NodeID"]
                for node in self._nodes()
                if all(node["Resources"].get(name, 0.0) >= amount for name, amount in self.bundle.items())
            ]
            chosen = min(fitting, key=lambda node_id: self._num_workers[node_id], default=None)
            self._num_workers[chosen] += 1
            return [chosen]

    def _describe_need(self, of_one: str) -> str:
        """Return what a worker needs, as text."""
        num_nodes = self.job.num_nodes
        return f"{describe(self.bundle)} of " + (of_one if num_nodes == 1 else f"each of {num_nodes} nodes or fewer")

    def _describe_nodes(self) -> str:
        nodes = (
            f"{node['NodeManagerAddress']}: "
            + describe({name: node["Resources"].get(name, 0.0) for name in self.bundle})
            for node in self._nodes()
        )
        return "; ".join(nodes)

    def _address_of(self, node_id: str) -> str:
        return next((node["NodeManagerAddress"] for node in self._nodes() if node["NodeID"] == node_id), "?")

    def _reachable(self, listen_address: str) -> str:
        """Return the address at which other nodes reach the server: in place of 0.0.0.0, this machine's own."""
        address = parse_address(listen_address, "listen_workers")
        if not isinstance(address, TcpAddress):
            raise ConfigError(
                f"listen_workers = {listen_address!r} is a socket of this machine, which workers on other nodes cannot "
                "reach; use tcp://HOST:PORT with placement = 'ray', or leave it out"
            )
        try:
            is_any = ipaddress.ip_address(address.host).is_unspecified
        except ValueError:  # a name
            is_any = False
        if not is_any:
            return str(address)
        head: str = self._ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")
        family, _, _, _, where = socket.getaddrinfo(head, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: it only chooses the interface towards the head node
            return str(TcpAddress(probe.getsockname()[0], address.port))


def _check_address(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray would wait for a minute, and end this process."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in address:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


class Reservation:
    """Resources for one worker, which Ray calls a placement group. Each of its bundles is on one node."""

    def __init__(self, group: Any, node_ids: list[str | None], addresses: list[str]) -> None:
        """`group` is None until Ray has been asked for it. The others are by bundle."""
        self.group = group
        self.node_ids = node_ids
        self.addresses = addresses

    def names(self) -> list[str]:
        """Return what logs and the server call the node of each bundle."""
        found = zip(self.addresses, self.node_ids, strict=True)
        return [f"{address}, Ray node {(node_id or '')[:8]}" for address, node_id in found]

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(self.names()))


class Placer:
    """Keeps as many workers on the cluster as the server asks for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._workers: list[PlacedWorker] = []

    def set_num_workers(self, num_workers: int) -> None:
        """Place more workers, or let some leave: first those that wait for resources, and of each kind the newest."""
        while len(self._workers) < num_workers:
            self._workers.append(PlacedWorker(self._cluster))
        while len(self._workers) > num_workers:
            waiting = [each for each in self._workers if not each.is_running]
            leaving = (waiting or self._workers)[-1]
            self._workers.remove(leaving)
            leaving.leave()


class PlacedWorker:
    """One worker, placed again whenever it ends, until it has to leave. Has a thread of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._actors: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="places a worker")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has its resources."""
        with self._lock:
            return bool(self._actors)

    def leave(self) -> None:
        """Let the worker finish its steps and end, in the background."""
        with self._lock:
            self._leaving.set()
            if self._actors:
                self._cluster.leave(self._actors)
                threading.Thread(target=self._kill_late, args=(self._actors,), daemon=True).start()

    def _kill_late(self, actors: list[Any]) -> None:
        self._thread.join(LEAVE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("a worker did not leave within %g s; it is killed", LEAVE_TIMEOUT_S)
            self._cluster.kill(actors)

    def _run(self) -> None:
        num_failures = 0
        while not self._leaving.is_set():
            began_s = time.monotonic()
            try:
                self._serve_once()
            except Exception:  # Ray's errors are of many kinds, and each of them may pass
                log.exception("a worker could not be placed")
            num_failures = 0 if time.monotonic() - began_s > STABLE_AFTER_S else num_failures + 1
            self._leaving.wait(min(MAX_DELAY_S, MIN_DELAY_S * 2.0 ** min(num_failures, 10)))

    def _serve_once(self) -> None:
        """Reserve resources, run a worker there until it ends, and give them back."""
        cluster = self._cluster
        reservation = cluster.reserve(self._leaving)
        if reservation is None:
            return
        try:
            with self._lock:
                if self._leaving.is_set():
                    return
                self._actors = actors = cluster.start_worker(reservation)
            log.info("a worker starts on %s", reservation)
            code, why = cluster.wait_for_end(actors, reservation)
            if len(actors) > 1:  # the share on one node serves no step without the others
                cluster.kill(actors)
            if self._leaving.is_set():
                log.info("the worker on %s has left", reservation)
                return
            log.warning("the worker on %s has ended, and is started again (%s)", reservation, why)
            if code == PERMANENT:
                where = " and ".join(dict.fromkeys(reservation.addresses))
                report(f"a worker on {where} cannot serve: {why}")
        finally:
            with self._lock:
                self._actors = []
            cluster.release(reservation)


def describe(resources: dict[str, float]) -> str:
    """Return resources as text: `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


if __name__ == "__main__":
    sys.exit(main())
