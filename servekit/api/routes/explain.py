"""GET /v1/requests/{id}/explain: where the time of a request went."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, caller_of
from servekit.api.explanations import Explanations
from servekit.api.responses.http import respond
from servekit.errors import RequestNotFound
from servekit.scheduler.explanation import Explanation


async def explain_request(request: Request) -> Response:
    """Split the wall time of a request of the same tenant into causes, which sum to it (docs/explain.md).

    `id` is the X-Request-Id of a request that runs, or of one of the last 1,024 that have ended.
    """
    explanations: Explanations = request.app.state.explanations
    return respond(explanations.find(caller_of(request).tenant, request.path_params["id"]))


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "GET",
        "/v1/requests/{id}/explain",
        explain_request,
        gives=(Explanation,),
        own_errors=(RequestNotFound,),
    ),
]
