"""What the server tells of itself: alive, ready, version, settings, metrics, and how to use it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit import __version__
from servekit.api.http import Endpoint, engine_of, respond
from servekit.config import redacted


async def health(request: Request) -> Response:
    """Alive: 503 once there is nothing left to hope for but a new process. Loading counts as alive."""
    return Response(status_code=200 if engine_of(request).is_healthy else 503)


async def ready(request: Request) -> Response:
    """200 when a token was sampled lately, or is for this very question; 503 with the reason otherwise."""
    engine = engine_of(request)
    if await engine.prove():
        return respond({"status": "ready"})
    state = "silent" if engine.state == "ready" else engine.state
    return respond({"status": state, "stage": engine.stage}, 503)


async def version(_: Request) -> Response:
    """The version."""
    return respond({"version": __version__})


async def info(request: Request) -> Response:
    """The model, the worker and every setting."""
    engine = engine_of(request)
    manager = engine.manager
    return respond(
        {
            "name": "servekit",
            "version": __version__,
            "model_name": engine.config.model_name,
            "max_total_tokens": manager.config.max_total_tokens,
            "worker": engine.worker,
            "settings": redacted(engine.config),
            # What TGI's clients look for.
            "model_id": engine.config.model,
            "max_input_tokens": manager.config.max_total_tokens - 1,
            "max_concurrent_requests": engine.config.max_num_queued_reqs,
            "max_client_batch_size": engine.config.max_client_batch_size,
        }
    )


async def metrics(request: Request) -> Response:
    """What operators watch, in Prometheus' text format."""
    return Response(engine_of(request).metrics.render(), media_type="text/plain; version=0.0.4")


async def index(_: Request) -> Response:
    """Who answers here."""
    return respond({"name": "servekit", "version": __version__})


ENDPOINTS: list[Endpoint] = [
    Endpoint("GET", "/health", health),
    Endpoint("GET", "/ready", ready),
    Endpoint("GET", "/version", version),
    Endpoint("GET", "/info", info),
    Endpoint("GET", "/metrics", metrics),
    Endpoint("GET", "/", index),
]
