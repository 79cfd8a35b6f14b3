"""Describe one HTTP route, and read what the application attaches to every request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.interface import Engine, GeneratingEngine, HttpCounters, Models
from servekit.errors import ServekitError
from servekit.requests.time_causes import RequestTimes, TimeCause


@dataclass(frozen=True)
class Endpoint:
    """One route, as the router and /openapi.json see it. The handler's docstring is its description."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    takes: tuple[Any, ...] = ()  # types of the JSON body, or for GET the type whose fields are query parameters
    gives: tuple[Any, ...] = ()  # types of the JSON answer
    streams: tuple[Any, ...] = ()  # types of one event of a stream
    stream_media_type: str = "text/event-stream"
    error: Any = None  # type of the body of an error; None: OpenAI's
    example: dict[str, Any] = field(default_factory=dict)
    not_in_query: tuple[str, ...] = ()  # fields of `takes` that a GET route refuses
    own_errors: tuple[type[ServekitError], ...] = ()  # errors that only this route returns
    form: dict[str, str] = field(default_factory=dict)  # of a body that is a form: its fields, and what they take
    in_batches: bool = False  # the requests of a batch may be for this route
    is_public: bool = False  # needs no API key, and accepts any Host header: for health probes


def models_of(request: Request) -> Models:
    """Return the models that this application serves."""
    models: Models = request.app.state.models
    return models


def engine_of(request: Request) -> GeneratingEngine:
    """Return the engine of the request's model. `engine_for` (servekit.api.model_choice) has found it before."""
    engine: GeneratingEngine = request.state.engine
    return engine


def counters_of(scope: Scope, models: Models) -> HttpCounters:
    """Return what counts a request: for its model, if that is known, otherwise for the server."""
    chosen: Engine | None = scope.get("state", {}).get("engine")
    return (chosen or models).http_counters


def mark(request: Request, cause: TimeCause) -> None:
    """Note the cause of the request's time since the last mark."""
    times: RequestTimes | None = getattr(request.state, "times", None)
    if times is not None:  # the lines of batches have none
        times.mark(cause)


def caller_of(request: Request) -> Caller:
    """Return the caller that authentication found, or the anonymous one."""
    caller: Caller = getattr(request.state, "caller", ANONYMOUS)
    return caller
