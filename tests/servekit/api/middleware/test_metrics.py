"""HTTP metrics of an application whose engine has not started."""

from __future__ import annotations

import asyncio
import os
import random
import string
import time

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from starlette.types import Message, Receive, Scope, Send

from servekit.api.app import create_app
from servekit.api.disconnect import disconnect_of
from servekit.api.explanations import Explanations
from servekit.api.middleware.metrics import METHODS, RequestMetrics
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.observability.process_metrics import watch_api_processes, watch_event_loop, watch_processes
from servekit.observability.request_trace import RequestTrace
from tests.support.timing import until


def make_scope(method: str, path: str) -> Scope:
    return {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "server": ("host", 1)}


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def nowhere(_: Message) -> None:
    pass


def counted(engine: LLMEngine) -> list[dict[str, str]]:
    family = next(each for each in engine.metrics.registry.collect() if each.name == "servekit_http_requests")
    return [sample.labels for sample in family.samples if sample.name.endswith("_total")]


async def test_a_thousand_random_methods_and_paths_create_at_most_six_series() -> None:
    engine, chance = LLMEngine(ServeConfig()), random.Random(0)
    app = create_app(engine)
    for _ in range(1000):
        method = "".join(chance.choices(string.ascii_uppercase, k=5))
        path = "/" + "".join(chance.choices(string.printable, k=8))
        await app(make_scope(chance.choice([method, "GET"]), path), gone, nowhere)
    series = counted(engine)
    assert {labels["handler"] for labels in series} <= {"other", "/"}
    assert {labels["method"] for labels in series} <= {*METHODS, "other"}
    assert len(series) <= 6
    assert sum(family.name.startswith("servekit") for family in engine.metrics.registry.collect()) < 100


async def test_path_with_a_parameter_counts_as_its_route() -> None:
    engine = LLMEngine(ServeConfig())
    app = create_app(engine)
    for name in ("a", "b"):
        await app(make_scope("GET", f"/v1/models/{name}"), gone, nowhere)
    assert [labels["handler"].partition("{")[0] for labels in counted(engine)] == ["/v1/models/"]


@pytest.mark.parametrize(("has_left", "status"), [(True, "499"), (False, "500")])
async def test_request_without_an_answer_counts_as_499_or_500(has_left: bool, status: str) -> None:
    async def app(scope: Scope, _: Receive, __: Send) -> None:
        if has_left:
            disconnect_of(scope).happen()
        raise RuntimeError

    engine = LLMEngine(ServeConfig())
    with pytest.raises(RuntimeError):
        await RequestMetrics(app, engine, [], Explanations())(make_scope("GET", "/"), gone, nowhere)
    assert [labels["status"] for labels in counted(engine)] == [status]


async def test_probes_and_unknown_paths_make_no_trace() -> None:
    engine, traces = LLMEngine(ServeConfig()), list[RequestTrace]()
    app = create_app(engine, record=traces.append)
    for method, path in (("GET", "/health"), ("GET", "/metrics"), ("POST", "/nowhere"), ("POST", "/generate")):
        await app(make_scope(method, path), gone, nowhere)
    assert [trace.route for trace in traces] == ["/generate"]


async def test_blocked_event_loop_shows_as_lag() -> None:
    lag, num_tasks = Histogram("lag", "", registry=None, buckets=(0.1,)), Gauge("tasks", "", registry=None)
    watching = asyncio.create_task(watch_event_loop(lag, num_tasks))
    await asyncio.sleep(0.05)
    time.sleep(0.45)  # noqa: ASYNC251 -- it is what the test is about

    def num_late() -> float:
        counts = {sample.labels.get("le"): sample.value for sample in next(iter(lag.collect())).samples}
        return counts["+Inf"] - counts["0.1"]

    await until(lambda: num_late() > 0)
    assert next(iter(num_tasks.collect())).samples[0].value == 2  # the test is one itself
    watching.cancel()


def test_missing_worker_has_no_memory_metric() -> None:
    registry, pids = CollectorRegistry(), [None, os.getpid()]
    watch_processes(registry, lambda: [({"replica": str(number)}, pid) for number, pid in enumerate(pids)])
    found = {family.name: family.samples for family in registry.collect()}
    assert "process_resident_memory_bytes" in found
    (memory,) = found["servekit_worker_process_resident_memory_bytes"]
    assert memory.labels == {"replica": "1"} and memory.value > 0
    pids[1] = None
    assert not any(family.name.startswith("servekit_worker") for family in registry.collect())


def test_memory_of_each_api_process_has_its_number() -> None:
    registry = CollectorRegistry()
    watch_api_processes(registry, lambda: [None, os.getpid()])
    (memory,) = {family.name: family.samples for family in registry.collect()}[
        "servekit_api_process_resident_memory_bytes"
    ]
    assert memory.labels == {"api_process": "1"}
