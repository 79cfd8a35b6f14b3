"""Send traces of requests to an OpenTelemetry collector. Needs the extra `servekit[otel]`; nobody else imports this.

A request's spans are made when it has ended, from the times that its sequences keep anyway, so nothing is done for them
while tokens flow. They wait in a bounded queue for a thread that sends them; what a collector does not take is dropped.
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

from servekit.request_trace import RequestTrace
from servekit.threads import in_daemon_thread

log = logging.getLogger("servekit")

MAX_QUEUED_SPANS = 4096
BATCH_SIZE = 128  # encoding one holds the interpreter for some milliseconds
DELIVERY_INTERVAL_S = 1.0
DELIVERY_TIMEOUT_S = 1.0
# For what has not been sent at the end. A collector that is well takes milliseconds.
CLOSE_TIMEOUT_S = 1.5
# Answers to one request whose phases are told; a thousand of them would be three thousand spans.
MAX_ANSWERS = 16


class Tracing:
    """Makes a request's spans, and has them sent to `endpoint`."""

    def __init__(self, endpoint: str, model_name: str, version: str) -> None:
        # What OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS say, the SDK reads itself.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "servekit", "service.version": version}),
            shutdown_on_exit=False,  # `close` does it, and not for longer than it says
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _Delivery(endpoint),
                max_queue_size=MAX_QUEUED_SPANS,
                max_export_batch_size=BATCH_SIZE,
                schedule_delay_millis=DELIVERY_INTERVAL_S * 1e3,
            )
        )
        self._tracer = self._provider.get_tracer("servekit", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def record(self, trace: RequestTrace) -> None:
        """Tell of a request that ends now: a span for it, below the caller's, and one for each phase of its answers."""
        shift_ns = time.time_ns() - int(trace.ended_s * 1e9)  # one for all times of a request, so that they nest

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
        """Send what waits, as far as that can be done soon."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await in_daemon_thread(TracerProvider.shutdown, self._provider)
        except TimeoutError:
            log.warning("the last traces were not sent: their collector did not answer in time")


class _Delivery(SpanExporter):
    """OTLP over HTTP. Says when the collector stops taking traces and when it takes them again, and not each time."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would say so every second
        self._exporter = OTLPSpanExporter(endpoint, timeout=DELIVERY_TIMEOUT_S)
        self._endpoint = endpoint
        self._is_well = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_well = result is SpanExportResult.SUCCESS
        if is_well != self._is_well:
            self._is_well = is_well
            log.warning("traces are %s", "taken again" if is_well else f"lost: {self._endpoint} does not take them")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
