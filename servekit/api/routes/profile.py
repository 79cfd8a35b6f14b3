"""POST /profile/start and /profile/stop: record what the worker's steps do, as a trace file on the server."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint
from servekit.api.model_choice import engine_for
from servekit.api.responses.http import respond
from servekit.engine.interface import GeneratingEngine
from servekit.engine.profiling import ProfilerRefuses


class ProfileStarted(msgspec.Struct):
    """Steps are recorded from now on, at most `max_steps` of them."""

    max_steps: int


class ProfileWritten(msgspec.Struct):
    """The path of the trace on the server, and the number of steps in it."""

    path: str
    num_steps: int


async def profile_start(request: Request) -> Response:
    """Start to record the worker's steps. The server must run with --profile."""
    return respond(ProfileStarted(await (await _engine(request)).profiling.start()))


async def profile_stop(request: Request) -> Response:
    """Stop recording, and write a trace for Perfetto or chrome://tracing."""
    trace = await (await _engine(request)).profiling.stop()
    return respond(ProfileWritten(trace.path, trace.num_steps))


async def _engine(request: Request) -> GeneratingEngine:
    return await engine_for(request, request.query_params.get("model"))


ENDPOINTS: list[Endpoint] = [
    Endpoint("POST", "/profile/start", profile_start, gives=(ProfileStarted,), own_errors=(ProfilerRefuses,)),
    Endpoint("POST", "/profile/stop", profile_stop, gives=(ProfileWritten,), own_errors=(ProfilerRefuses,)),
]
