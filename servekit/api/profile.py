"""POST /profile/start and /profile/stop: what the worker does in its steps, as a file on the server."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from servekit.api.http import Endpoint, engine_of, respond


class ProfileStarted(msgspec.Struct):
    """Steps are recorded from now on, `max_steps` of them at most."""

    max_steps: int


class ProfileWritten(msgspec.Struct):
    """Where on the server the trace is, and how many steps are in it."""

    path: str
    num_steps: int


async def profile_start(request: Request) -> Response:
    """Begin to record what the worker's steps do, on a server that was started with --profile."""
    return respond(ProfileStarted(await engine_of(request).profiling.start()))


async def profile_stop(request: Request) -> Response:
    """Write what was recorded as a trace for Perfetto or chrome://tracing."""
    told = await engine_of(request).profiling.stop()
    return respond(ProfileWritten(told.path, told.num_steps))


ENDPOINTS: list[Endpoint] = [
    Endpoint("POST", "/profile/start", profile_start, gives=(ProfileStarted,)),
    Endpoint("POST", "/profile/stop", profile_stop, gives=(ProfileWritten,)),
]
