"""/openapi.json lists the errors of every route, and no schema is stricter than the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from servekit.api.app import ENDPOINTS
from servekit.api.openapi import document
from servekit.api.schemas.json_body import encode
from servekit.api.schemas.native import GenerateResponse, Usage
from servekit.engine.profiling import ProfilerRefuses
from servekit.errors import ConfigError, ServekitError, StorageFailed
from servekit.observability.live_frames import LiveState, LiveStep, LiveWorker
from servekit.scheduler.sequence import FinishReason

API: dict[str, Any] = json.loads(encode(document(ENDPOINTS)))

NOT_OF_EVERY_BODY = (ConfigError, ProfilerRefuses, StorageFailed)


def errors(kind: type[ServekitError] = ServekitError) -> Iterator[type[ServekitError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from errors(below)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    return (
        (method, path, operation) for path, methods in API["paths"].items() for method, operation in methods.items()
    )


def test_routes_with_a_body_list_every_error() -> None:
    statuses = {str(kind.status) for kind in errors() if kind not in NOT_OF_EVERY_BODY}
    for _, path, operation in operations():
        if "requestBody" in operation:
            assert operation["responses"].keys() - {"507"} == {"200", *statuses}, path


@pytest.mark.parametrize(
    ("method", "path", "known", "unknown"),
    [
        ("get", "/health", {"200", "503"}, {"401", "403", "429", "400", "413"}),
        ("get", "/metrics", {"200", "401", "429"}, {"400", "404", "413", "504"}),
        ("get", "/v1/models/{model}", {"401", "404"}, {"400", "413"}),
        ("get", "/generate_stream", {"400", "404", "504"}, {"413", "415", "409"}),  # 404: of `model`
        ("get", "/ui/state", {"200", "401", "429"}, {"400", "404", "413", "504", "409"}),
        ("get", "/ui/events", {"200", "401", "429", "503"}, {"400", "404", "413", "504", "409"}),
        ("post", "/profile/start", {"401", "409", "503"}, {"400", "404", "413", "415", "504"}),
    ],
)
def test_route_lists_only_errors_that_it_returns(method: str, path: str, known: set[str], unknown: set[str]) -> None:
    statuses = API["paths"][path][method]["responses"].keys()
    assert known <= statuses and not unknown & statuses


def test_errors_share_the_schema_of_their_api_and_overload_has_retry_after() -> None:
    for _, path, operation in operations():
        for status, response in operation["responses"].items():
            assert response["description"]
            if status != "200" and "content" in response:
                own = {"api": "/OllamaError", "v1/messages": "/AnthropicError"}
                schema = next((own[each] for each in own if path.startswith(f"/{each}")), "/ErrorResponse")
                assert response["content"]["application/json"]["schema"]["$ref"].endswith(schema), path
                assert ("Retry-After" in response.get("headers", {})) == (status in ("429", "503"))


def test_native_answer_that_also_matches_tgis_schema_is_valid() -> None:
    """A native answer has all fields of TGI's. `oneOf` would refuse it."""
    schema = API["paths"]["/generate"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    answer = GenerateResponse("gen-1", "Hello", FinishReason.STOP, None, Usage(1, 1, 2, 0))
    jsonschema.validate(json.loads(encode(answer)), schema | {"components": API["components"]})


def test_object_in_a_query_string_is_json() -> None:
    parameters = {parameter["name"]: parameter for parameter in API["paths"]["/generate_stream"]["get"]["parameters"]}
    assert {name for name, parameter in parameters.items() if "content" in parameter} == {"logit_bias", "grammar"}
    assert all(("schema" in parameter) != ("content" in parameter) for parameter in parameters.values())


def test_live_frame_matches_its_schema() -> None:
    """Also with steps and cells, which are arrays, not objects."""
    content = API["paths"]["/ui/state"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    step, worker = LiveStep(7, 1.0, 5, 3, 4, None), LiveWorker("serving")
    frame = LiveState(1.0, "ready", "serving", "demo", "1.2.3", [worker], steps=[step], cells=[(-1, 4), (0, 2)])
    encoded = json.loads(encode(frame))
    assert encoded["steps"] == [[7, 1.0, 5, 3, 4, None, 0]] and encoded["cells"] == [[-1, 4], [0, 2]]
    jsonschema.validate(encoded, content | {"components": API["components"]})
    events = API["paths"]["/ui/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert events == content


def test_console_files_are_not_in_the_document() -> None:
    assert {path for path in API["paths"] if path.startswith("/ui")} == {"/ui/state", "/ui/events"}
