"""Report the server's health, readiness, version, settings and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit import __version__
from servekit.api.endpoint import Endpoint, engine_of
from servekit.api.responses.http import respond
from servekit.config import redacted


async def health(request: Request) -> Response:
    """Return 200 while the process works, also while the model loads. 503 means that it must be restarted."""
    return Response(status_code=200 if engine_of(request).is_healthy else 503)


async def ready(request: Request) -> Response:
    """Return 200 if the model sampled a token lately, or samples one for this request; else 503 with the reason."""
    engine = engine_of(request)
    if await engine.probe_readiness():
        return respond({"status": "ready"})
    state = "silent" if engine.state == "ready" else engine.state
    return respond({"status": state, "stage": engine.stage}, 503)


async def version(_: Request) -> Response:
    """Return the version of servekit."""
    return respond({"version": __version__})


async def info(request: Request) -> Response:
    """Return the model, the workers and all settings; secrets are masked."""
    engine = engine_of(request)
    max_total_tokens = engine.scheduler_config.max_total_tokens
    return respond(
        {
            "name": "servekit",
            "version": __version__,
            "model_name": engine.config.model_name,
            "max_total_tokens": max_total_tokens,
            "max_drafts": engine.scheduler_config.max_drafts,
            "worker": engine.worker,
            "replicas": await engine.describe_replicas(),
            "settings": redacted(engine.config),
            # The names that TGI's clients read.
            "model_id": engine.config.model,
            "max_input_tokens": max_total_tokens - 1,
            "max_concurrent_requests": engine.config.max_num_queued_reqs,
            "max_client_batch_size": engine.config.max_client_batch_size,
        }
    )


async def metrics(request: Request) -> Response:
    """Return the server's metrics in Prometheus' text format."""
    return Response(await engine_of(request).render_metrics(), media_type="text/plain; version=0.0.4")


async def index(_: Request) -> Response:
    """Return the name and version of the server; a browser gets the console instead."""
    return respond({"name": "servekit", "version": __version__})


ENDPOINTS: list[Endpoint] = [
    Endpoint("GET", "/health", health, is_public=True),
    Endpoint("GET", "/ready", ready, is_public=True),
    Endpoint("GET", "/version", version),
    Endpoint("GET", "/info", info),
    Endpoint("GET", "/metrics", metrics),
    Endpoint("GET", "/", index),
]
