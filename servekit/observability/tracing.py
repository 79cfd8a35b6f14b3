"""Send traces of requests to an OpenTelemetry collector. Needs the extra `otel`, so the server imports this lazily.

Spans are created when a request has ended, from times that its sequences record anyway, so tracing costs nothing per
token. They wait in a bounded queue for a thread that exports them. Spans that the collector refuses are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from servekit.aio.daemon_thread import run_in_daemon_thread
from servekit.observability.request_trace import RequestTrace

log = logging.getLogger("servekit")

MAX_QUEUED_SPANS = 4096
BATCH_SIZE = 128  # encoding one holds the interpreter for some milliseconds
DELIVERY_INTERVAL_S = 1.0
DELIVERY_TIMEOUT_S = 1.0
# For the spans that are still queued at shutdown. A healthy collector needs milliseconds.
CLOSE_TIMEOUT_S = 1.5
# Answers of one request that get spans for their phases: a thousand answers would make three thousand spans.
MAX_ANSWERS = 16


class Tracing:
    """Creates the spans of requests, and exports them to `endpoint`."""

    def __init__(self, endpoint: str, model_name: str, version: str) -> None:
        # The SDK itself reads OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "servekit", "service.version": version}),
            shutdown_on_exit=False,  # `close` does this, with a timeout
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _Exporter(endpoint),
                max_queue_size=MAX_QUEUED_SPANS,
                max_export_batch_size=BATCH_SIZE,
                schedule_delay_millis=DELIVERY_INTERVAL_S * 1e3,
            )
        )
        self._tracer = self._provider.get_tracer("servekit", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def record(self, trace: RequestTrace) -> None:
        """Create the spans of a request that ends now: one below the caller's, one for each phase of each answer."""
        # The same shift for all times of a request, so that its spans nest.
        shift_ns = time.time_ns() - int(trace.ended_s * 1e9)

        def wall_ns(seconds: float) -> int:
            return int(seconds * 1e9) + shift_ns

        span = self._tracer.start_span(
            f"{trace.method} {trace.route}",
            self._propagator.extract(trace.headers),
            SpanKind.SERVER,
            trace.attributes(self._model_name),
            start_time=wall_ns(trace.started_s),
        )
        if trace.first_token_s is not None:
            span.add_event("first_token", timestamp=wall_ns(trace.first_token_s))
        if trace.is_failed:
            span.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(span)
        for index, answer in enumerate(trace.answers[:MAX_ANSWERS]):
            for name, start_s, end_s in answer.phases(trace.ended_s):
                phase = self._tracer.start_span(
                    name, context, attributes={"servekit.answer": index}, start_time=wall_ns(start_s)
                )
                phase.end(wall_ns(end_s))
        span.end(wall_ns(trace.ended_s))

    async def close(self) -> None:
        """Export the queued spans, for at most CLOSE_TIMEOUT_S."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await run_in_daemon_thread(TracerProvider.shutdown, self._provider)
        except TimeoutError:
            log.warning("the last traces were dropped: the collector did not answer within %g s", CLOSE_TIMEOUT_S)


class _Exporter(SpanExporter):
    """Exports OTLP over HTTP. Logs when exports begin to fail and when they succeed again, not each failure."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failure, once a second
        self._exporter = OTLPSpanExporter(endpoint, timeout=DELIVERY_TIMEOUT_S)
        self._endpoint = endpoint
        self._is_healthy = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_healthy = result is SpanExportResult.SUCCESS
        if is_healthy != self._is_healthy:
            self._is_healthy = is_healthy
            if is_healthy:
                log.info("traces are exported to %s again", self._endpoint)
            else:
                log.warning("traces are dropped: cannot export to %s (otlp_endpoint)", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
