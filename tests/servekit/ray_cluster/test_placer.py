"""What is placed, and what is placed anew, with a cluster that needs no Ray."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from servekit.ray_cluster import placer
from servekit.ray_cluster.placer import Cluster, Placer, Reservation, describe
from tests.servekit.ray_cluster.test_worker_actor import JOB

ENOUGH_S = 30.0


class StandInActor:
    """A worker that runs until it is asked to leave, or until a test ends it."""

    def __init__(self) -> None:
        self.ends: queue.Queue[tuple[int | None, str]] = queue.Queue()
        self.leave = SimpleNamespace(remote=lambda: self.ends.put((0, "exit code 0: left")))


class StandInCluster:
    """A cluster with room for some workers, each on one node, or on two."""

    def __init__(self, room: int, num_nodes: int = 1) -> None:
        self._num_nodes = num_nodes
        self.started: queue.Queue[StandInActor] = queue.Queue()
        self.killed: list[StandInActor] = []
        self._room = threading.Semaphore(room)
        self.num_reserved = 0

    def reserve(self, stopping: threading.Event) -> Reservation | None:
        while not self._room.acquire(timeout=0.01):
            if stopping.is_set():
                return None
        self.num_reserved += 1
        addresses = ["10.0.0.7", "10.0.0.8"][: self._num_nodes]
        return Reservation(None, ["0123456789"] * self._num_nodes, addresses)

    def release(self, _: Reservation) -> None:
        self.num_reserved -= 1
        self._room.release()

    def start_worker(self, _: Reservation) -> list[StandInActor]:
        actors = [StandInActor() for _ in range(self._num_nodes)]
        self.started.put(actors[0])
        return actors

    def wait_for_end(self, actors: list[StandInActor], _: Reservation) -> tuple[int | None, str]:
        return actors[0].ends.get(timeout=ENOUGH_S)

    def leave(self, actors: list[StandInActor]) -> None:
        for actor in actors:
            actor.leave.remote()

    def kill(self, actors: list[StandInActor]) -> None:
        self.killed += actors
        for actor in actors:
            actor.ends.put((None, "killed"))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "MIN_DELAY_S", 0.01)


def test_a_worker_that_ends_is_placed_anew_and_one_that_leaves_is_not() -> None:
    cluster = StandInCluster(room=2)
    placing = Placer(cast(Cluster, cluster))
    placing.set_num_workers(2)
    first, second = cluster.started.get(timeout=ENOUGH_S), cluster.started.get(timeout=ENOUGH_S)
    first.ends.put((None, "the node is gone"))
    anew = cluster.started.get(timeout=ENOUGH_S)
    placing.set_num_workers(1)
    wait_until(lambda: cluster.num_reserved == 1)
    placing.set_num_workers(0)
    wait_until(lambda: cluster.num_reserved == 0)
    assert cluster.started.empty() and not cluster.killed
    assert second is not anew


def test_a_worker_that_waits_for_room_gets_it_when_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = StandInCluster(room=1)
    placing = Placer(cast(Cluster, cluster))
    placing.set_num_workers(2)
    cluster.started.get(timeout=ENOUGH_S).ends.put((None, "lost"))
    cluster.started.get(timeout=ENOUGH_S)
    assert cluster.num_reserved == 1
    placing.set_num_workers(0)
    wait_until(lambda: cluster.num_reserved == 0)


def test_a_worker_that_waits_for_room_leaves_before_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = StandInCluster(room=2)
    placing = Placer(cast(Cluster, cluster))
    placing.set_num_workers(2)
    older, newer = placing._workers
    wait_until(lambda: older.is_running and newer.is_running)
    monkeypatch.setattr(cluster, "reserve", lambda stopping: stopping.wait(ENOUGH_S) and None)  # there is no room
    older._actors[0].ends.put((None, "the node is gone"))
    wait_until(lambda: not older.is_running)
    placing.set_num_workers(1)
    assert placing._workers == [newer] and newer.is_running
    placing.set_num_workers(0)
    wait_until(lambda: cluster.num_reserved == 0)


def test_a_worker_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "LEAVE_TIMEOUT_S", 0.05)
    cluster = StandInCluster(room=1)
    placing = Placer(cast(Cluster, cluster))
    placing.set_num_workers(1)
    actor = cluster.started.get(timeout=ENOUGH_S)
    actor.leave = SimpleNamespace(remote=lambda: None)
    wait_until(lambda: placing._workers[0]._actors == [actor])
    placing.set_num_workers(0)
    wait_until(lambda: cluster.killed == [actor])


def test_a_worker_that_cannot_serve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(placer, "report", reported.put)
    cluster = StandInCluster(room=1)
    placing = Placer(cast(Cluster, cluster))
    placing.set_num_workers(1)
    cluster.started.get(timeout=ENOUGH_S).ends.put((2, "exit code 2: there is no model"))
    assert reported.get(timeout=ENOUGH_S) == ("a worker on 10.0.0.7 cannot serve: exit code 2: there is no model")
    placing.set_num_workers(0)
    wait_until(lambda: cluster.num_reserved == 0)


def test_the_end_of_the_share_on_one_node_is_the_end_of_those_on_the_others() -> None:
    cluster = StandInCluster(room=1, num_nodes=2)
    placing = Placer(cast(Cluster, cluster))
    placing.set_num_workers(1)
    first = cluster.started.get(timeout=ENOUGH_S)
    first.ends.put((None, "the node is gone"))
    anew = cluster.started.get(timeout=ENOUGH_S)
    assert len(cluster.killed) == 2 and cluster.killed[0] is first and cluster.killed[1] is not anew
    placing.set_num_workers(0)
    wait_until(lambda: cluster.num_reserved == 0)


class StandInGroup:
    """A placement group that Ray has reserved, or that raises."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def wait(self, _: float) -> bool:
        if self._fails:
            raise RuntimeError("the head node is gone")
        return True


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("where", ["placement_group", "wait", "placement_group_table", None])
def test_what_was_reserved_is_released_if_ray_raises(
    where: str | None, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[StandInGroup] = []
    found = dict(zip(range(num_nodes), ("other", "large"), strict=False))

    def make_group(*_: Any, **__: Any) -> StandInGroup:
        if where == "placement_group":
            raise RuntimeError("the head node is gone")
        return StandInGroup(fails=where == "wait")

    def table(_: StandInGroup) -> dict[str, Any]:
        return {"bundles_to_node_id": {} if where == "placement_group_table" else found}

    module = SimpleNamespace(
        placement_group=make_group, placement_group_table=table, remove_placement_group=removed.append
    )
    for name in ("ray", "ray.util", "ray.util.placement_group"):
        monkeypatch.setitem(sys.modules, name, cast(Any, module))
    nodes = [
        {"NodeID": name, "Alive": True, "NodeManagerAddress": name, "Resources": {"CPU": amount}}
        for name, amount in (("large", 2.0), ("other", 1.0))
    ]
    cluster = Cluster.__new__(Cluster)
    cluster._ray = SimpleNamespace(nodes=lambda: nodes)
    cluster.bundle = {"CPU": 2.0}
    cluster.job = replace(JOB, num_nodes=num_nodes)
    cluster._lock = threading.Lock()
    cluster._num_workers = Counter()
    if where is None:
        reservation = cluster.reserve(threading.Event())
        assert reservation is not None
        assert reservation.names() == ["other, Ray node other", "large, Ray node large"][:num_nodes]
        assert +cluster._num_workers == ({"other": 1} if num_nodes == 1 else {"other": 1, "large": 1})
        assert removed == []
        cluster.release(reservation)
        assert removed == [reservation.group]
    else:
        with pytest.raises((RuntimeError, KeyError)):
            cluster.reserve(threading.Event())
        assert len(removed) == (where != "placement_group")
    assert cluster._num_workers.total() == 0


def test_resources_are_described_in_words() -> None:
    assert describe({"CPU": 2.0, "GPU": 0.5}) == "2 CPU, 0.5 GPU"
