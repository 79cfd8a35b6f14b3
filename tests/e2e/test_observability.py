"""Tests of what operators see of a running server: metrics, dashboard, alerts and traces."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from scripts.dashboard import dashboard
from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.observability import tracing as tracing_module
from servekit.observability.cost import Cost
from servekit.observability.gpu_metrics import GpuCollector, GpuReading
from servekit.observability.metrics import Metrics
from servekit.observability.request_trace import RequestTrace
from servekit.observability.tracing import DELIVERY_TIMEOUT_S, MAX_QUEUED_SPANS, Tracing
from servekit.scheduler.draft_length import DraftLengths
from servekit.server.server import connect_tracing
from tests.support.server_process import ServerProcess, serving

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
TARGET_LABELS = {"job", "instance", "node"}  # Prometheus' own, and that of the chart's ServiceMonitor
PROMPT = "What color is the sky?"
GPU = GpuReading(
    index=0,
    name="",
    uuid="",
    memory_used_bytes=1,
    memory_total_bytes=1,
    utilization=1.0,
    power_watts=1.0,
    energy_joules=1.0,
    temperature_celsius=1.0,
)

# -- metrics -----------------------------------------------------------------------------------------------------------


def expressions() -> Iterator[tuple[str, str]]:
    """(panel or alert, PromQL) of every expression in the dashboard and in the alerts."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def nodes(expression: Any) -> Iterator[Any]:
    yield expression
    children = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for child in [*children, *getattr(expression, "args", ())]:
        if child is not None:
            yield from nodes(child)


@pytest.fixture(scope="module")
def series(server: ServerProcess) -> dict[str, set[str]]:
    """The labels of each series that the server has after some traffic, and the two that Prometheus adds."""
    server.generate(PROMPT)
    server.client.post("/generate", content=b"{")
    other = Metrics(ServeConfig(), "")  # this server exports nothing of these: it has no drafts, no GPU and no price
    other.watch_drafts("ngram", lambda: [DraftLengths(1)])
    other.watch_cost(lambda: Cost(1.0, 1.0, 1.0))
    other.registry.register(GpuCollector([GPU]))
    text = server.client.get("/metrics").text
    found: dict[str, set[str]] = {"up": set(TARGET_LABELS)}
    kinds = ("servekit_spec_decode", "servekit_cost", "servekit_gpu")
    missing = [family for family in other.registry.collect() if family.name.startswith(kinds)]
    for family in (*missing, *text_string_to_metric_families(text)):
        for sample in family.samples:
            found.setdefault(sample.name, set(TARGET_LABELS)).update(sample.labels)
    return found


def test_every_series_of_the_dashboard_and_the_alerts_exists(series: dict[str, set[str]]) -> None:
    for where, text in expressions():
        expression = promql_parser.parse(text)
        for node in nodes(expression):
            used: set[str] = set()
            if isinstance(node, promql_parser.VectorSelector):
                assert node.name in series, f"{where}: there is no {node.name}"
                assert {matcher.name for matcher in node.matchers.matchers} <= series[node.name], where
            elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                used = set(node.modifier.labels)
            for below in nodes(node) if used else ():
                if isinstance(below, promql_parser.VectorSelector):
                    assert used <= series[below.name], f"{where}: {below.name} has not all of {used}"


def test_quantiles_use_buckets_and_rates_use_counters(series: dict[str, set[str]]) -> None:
    num_quantiles = num_rates = 0
    for where, text in expressions():
        for node in nodes(promql_parser.parse(text)):
            if not isinstance(node, promql_parser.Call):
                continue
            names = [below.name for below in nodes(node) if isinstance(below, promql_parser.VectorSelector)]
            if node.func.name == "histogram_quantile":
                num_quantiles += 1
                assert names[0].endswith("_bucket") and "le" in node.args[1].modifier.labels, where
            if node.func.name in ("rate", "increase"):
                num_rates += 1
                assert names[0].endswith(("_total", "_bucket", "_seconds_sum", "_seconds_count")), where
    assert num_quantiles > 30 and num_rates > 40


def test_legends_and_variables_use_labels_that_exist(series: dict[str, set[str]]) -> None:
    board, known = dashboard(), set().union(*series.values())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known, panel["title"]
            variables = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert variables <= {variable["name"] for variable in board["templating"]["list"]}
    for variable in board["templating"]["list"][1:]:
        name, label = re.findall(r"label_values\((\w+).*, (\w+)\)", variable["definition"])[0]
        assert label in series[name]


def test_metrics_agree_with_the_usage_of_a_response(server: ServerProcess) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    names += ("request_prefill_time_seconds_count", "request_decode_time_seconds_count")
    before = {name: server.metric(f"servekit_{name}") for name in names}
    usage = server.generate(PROMPT, n=3, temperature=1.0)["usage"]
    increases = {name: server.metric(f"servekit_{name}") - before[name] for name in names}
    assert list(increases.values()) == [usage["prompt_tokens"], usage["completion_tokens"], 3, 3, 3]
    assert server.metric("process_resident_memory_bytes") > 2**24
    assert server.metric("servekit_worker_process_resident_memory_bytes") > 2**24
    assert server.metric("servekit_api_event_loop_tasks") > 2
    assert server.metric("servekit_workers_alive") == 1
    assert server.metric("servekit_api_event_loop_lag_seconds_count") > 0
    assert server.metric("servekit_ipc_roundtrip_seconds_count") > 0
    server.wait_for_metric("servekit_scheduler_batch_size", 0)


def test_a_client_that_disconnects_counts_as_499(server: ServerProcess) -> None:
    def num_left() -> float:
        text = server.client.get("/metrics").text
        found = re.findall(
            r'^servekit_http_requests_total{handler="/generate",.*status="499"} (.*)$', text, re.MULTILINE
        )
        return float(found[0]) if found else 0.0

    before = num_left()
    with pytest.raises(Exception, match="timed out"):
        server.client.post("/generate", json={"prompt": "a", "max_tokens": 1500, "ignore_eos": True}, timeout=0.2)
    deadline = time.monotonic() + 60
    while num_left() != before + 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- traces ------------------------------------------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """Accepts OTLP over HTTP. With `hangs` set it reads requests and does not answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.hangs = threading.Event()
        self.ended = threading.Event()

    def spans(self) -> list[Any]:
        messages = map(ExportTraceServiceRequest.FromString, list(self.bodies))
        return [
            span
            for message in messages
            for of_resource in message.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def wait_for(self, num_roots: int) -> list[Any]:
        """Wait for this many request spans, and return them."""
        deadline = time.monotonic() + 60
        while len(roots := [span for span in self.spans() if span.kind == span.SPAN_KIND_SERVER]) < num_roots:
            assert time.monotonic() < deadline, f"{len(roots)} of {num_roots} traces came"
            time.sleep(0.02)
        return roots


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.hangs.is_set():
            self.server.ended.wait(600)
            return
        self.server.paths.append(self.path)
        self.server.bodies.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        collector.ended.set()
        collector.shutdown()
        collector.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_spans_cover_the_phases_of_a_request(tmp_path: Path) -> None:
    """And a collector that hangs holds up neither the server nor its end."""
    flags = ("--model", "sim:step=1ms", "--otlp-endpoint")
    with collecting() as collector, serving(*flags, collector.url, log=tmp_path / "log") as server:
        server.generate("warm up", max_tokens=9)
        caller = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x-request-id": "mine"}
        began = time.time_ns()
        answer = server.client.post("/generate", json={"prompt": PROMPT, "max_tokens": 9}, headers=caller)
        ended = time.time_ns()
        server.client.post("/generate", content=b"{", headers={"traceparent": "nonsense"})
        server.client.get("/health")
        asked, refused = collector.wait_for(3)[-2:]
        assert set(collector.paths) == {"/v1/traces"}
        assert asked.name == refused.name == "POST /generate"
        values = attributes(asked)
        assert asked.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
        assert asked.parent_span_id.hex() == "b7ad6b7169203331"
        assert values["servekit.request_id"] == "mine"
        assert values["gen_ai.request.max_tokens"] == 9
        assert values["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
        assert [event.name for event in asked.events] == ["first_token"]

        phases = [span for span in collector.spans() if span.parent_span_id == asked.span_id]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        assert began <= asked.start_time_unix_nano <= phases[0].start_time_unix_nano
        assert phases[-1].end_time_unix_nano <= asked.end_time_unix_nano
        assert asked.end_time_unix_nano <= ended + 60 * 10**9, "the server lets go last, unseen"
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in phases)
        for before, after in pairwise(phases):
            assert before.end_time_unix_nano == after.start_time_unix_nano
        assert asked.events[0].time_unix_nano == phases[2].start_time_unix_nano
        inside = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in phases)
        whole = asked.end_time_unix_nano - asked.start_time_unix_nano
        assert 0.01 * whole < inside <= whole, "what is left is reading, writing and telling"

        assert attributes(refused)["http.response.status_code"] == 400
        assert not refused.parent_span_id
        assert b"sky" not in b"".join(collector.bodies), "no prompts, no answers"

        collector.hangs.set()
        started = time.monotonic()
        for _ in range(8):
            server.generate(PROMPT, max_tokens=1)
        assert time.monotonic() - started < 8 * DELIVERY_TIMEOUT_S, "requests do not wait for the collector"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log.read_text()


async def test_traces_without_a_working_collector_cost_no_time_and_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing_module, "CLOSE_TIMEOUT_S", 60.0)  # to export 4,000 spans on a busy machine
    with collecting() as collector:
        collector.hangs.set()
        tracing = Tracing(collector.url, "demo", "0")
        num_slow = 0
        for _ in range(MAX_QUEUED_SPANS + 1000):
            started = now = time.perf_counter()
            tracing.record(
                RequestTrace(
                    method="POST", route="/", status=200, headers={}, request_id="", started_s=now, ended_s=now
                )
            )
            num_slow += time.perf_counter() - started > DELIVERY_TIMEOUT_S / 2
        assert num_slow < 10, "no request waits for the collector; other programs may delay a few"
        queue = tracing._provider._active_span_processor._span_processors[0]._batch_processor._queue
        assert MAX_QUEUED_SPANS - 500 < len(queue) <= MAX_QUEUED_SPANS
        collector.hangs.clear()
        collector.ended.set()
        await tracing.close()
        assert len(collector.spans()) >= MAX_QUEUED_SPANS - 500, "queued spans are sent when the collector works again"


def test_tracing_without_the_otel_extra_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_tracing(ServeConfig()) is None
    with pytest.raises(ConfigError, match="use one like http://host:4318"):
        connect_tracing(ServeConfig(otlp_endpoint="localhost:4318"))
    monkeypatch.delitem(sys.modules, "servekit.observability.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=re.escape("pip install '.[otel]'")):
        connect_tracing(ServeConfig(otlp_endpoint="http://localhost:4318"))


def test_metrics_and_info_say_what_tokens_cost(tmp_path: Path) -> None:
    flags = ("--model", "sim:instant", "--data-parallel-size", "2", "--price-per-hour", "1.25")
    with serving(*flags, log=tmp_path / "log") as server:
        assert server.metric("servekit_cost_per_hour") == 2 * 1.25
        server.generate(PROMPT, max_tokens=8)
        cost = server.client.get("/info").json()["cost"]
        assert cost["per_hour"] == 2 * 1.25 and cost["total"] > 0.0 and cost["per_million_tokens"] > 0.0
        assert server.metric("servekit_cost_per_million_tokens") >= cost["per_million_tokens"], "idle time costs, too"
        assert server.metric("servekit_total_queued_requests") == server.metric("servekit_total_running_requests") == 0
