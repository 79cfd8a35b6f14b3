"""What Ray Serve's proxy calls: passes requests on to the servers, and their answers to the clients.

It is a deployment of its own, because a request router sees the bodies of requests only in calls between deployments.
"""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from servekit.errors import RequestTooLarge, ServekitError, WorkerLost
from servekit.ray_cluster.forwarding import error_body, forwarded, read_body

log = logging.getLogger("ray.serve")

RETRY_AFTER_S = 1


class Ingress:
    """Passes each request on to one server. Ray Serve's router chooses it."""

    def __init__(self, servers: Any, max_body_bytes: int) -> None:
        """`servers` is the handle of the deployment of `ServerReplica`."""
        self._servers = servers.options(stream=True, method_name="forward")
        self._max_body_bytes = max_body_bytes

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, piece by piece as the server answers."""
        try:
            body = await read_body(receive, self._max_body_bytes)
        except RequestTooLarge as error:
            await _refusal(error)(scope, receive, send)
            return
        if body is None:
            return
        pieces = self._servers.remote(forwarded(scope, body))
        try:
            status, headers = await anext(pieces)
        except (aiohttp.ClientError, RayError, RayServeException) as error:  # the server or its node was lost
            log.warning("a request failed: the server that computed it was lost: %s", error)
            await _refusal(WorkerLost("the server that had the request was lost. Please try again."))(
                scope, receive, send
            )
            return
        encoded = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in headers
            if name.lower() != "x-request-id"  # which the proxy has given to the server, and adds to the answer itself
        ]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def ingress_class() -> Any:
    """Return the class for Ray Serve: Ingress, with an ASGI application that calls its `answer`."""
    return serve.ingress(Starlette(routes=[Route("/{path:path}", _Asgi())]))(Ingress)


class _Asgi:
    """Calls the Ingress of this process. Ray Serve copies the application to each replica before there is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve.get_replica_context().servable_object.answer(scope, receive, send)


def _refusal(error: ServekitError) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, WorkerLost) else {}
    return JSONResponse(error_body(error), error.status, headers)
