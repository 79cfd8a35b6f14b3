"""Report the server's health, readiness, version, settings and metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from servekit import __version__
from servekit.api.endpoint import Endpoint, caller_of, models_of
from servekit.api.responses.http import respond
from servekit.config import redacted


async def health(request: Request) -> Response:
    """Return 200 while the process works, also while the model loads. 503 means that it must be restarted."""
    return Response(status_code=200 if models_of(request).is_healthy else 503)


async def ready(request: Request) -> Response:
    """Return 200 if the model sampled a token lately, or samples one for this request; else 503 with the reason."""
    models = models_of(request)
    if await models.probe_readiness():
        return respond({"status": "ready"})
    state = "silent" if models.state == "ready" else models.state
    return respond({"status": state, "stage": models.stage}, 503)


async def version(_: Request) -> Response:
    """Return the version of servekit."""
    return respond({"version": __version__})


async def info(request: Request) -> Response:
    """Return a model, its workers and all settings; secrets are masked. The query parameter `model` chooses the model.

    A server with several models describes the default one otherwise, and lists all of them with their states.
    """
    models, caller = models_of(request), caller_of(request)
    model = models.find(request.query_params.get("model"), caller)
    engine, max_total_tokens, config = model.engine, model.max_prompt_tokens, model.config
    described: dict[str, Any] = {
        "name": "servekit",
        "version": __version__,
        "model_name": model.name,
        "max_total_tokens": max_total_tokens,
        "kind": model.kind,
        "max_drafts": None,
        "worker": model.worker,
        "replicas": [],
        "settings": redacted(config),
        # The names that TGI's clients read.
        "model_id": config.model,
        "max_input_tokens": None if max_total_tokens is None else max_total_tokens - 1,
        "max_concurrent_requests": config.max_num_queued_reqs,
        "max_client_batch_size": config.max_client_batch_size,
    }
    if engine is not None:
        described |= await engine.describe()
    if models.has_choice:
        described["models"] = [
            {"id": each.name, "kind": each.kind, "state": each.state, "model": each.config.model}
            for each in models.served(caller)
        ]
    return respond(described)


async def metrics(request: Request) -> Response:
    """Return the server's metrics in Prometheus' text format."""
    return Response(await models_of(request).render_metrics(), media_type="text/plain; version=0.0.4")


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
