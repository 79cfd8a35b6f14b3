"""Send requests that Schemathesis generates from the server's /openapi.json, thousands for each route with parameters.

Half of them are valid by the document and half are not. A real server gets them over HTTP: generating a case takes
longer than answering it, and both run at the same time, on a core each. The server's context has a few tokens only, so
accepted requests are short. The status of each answer must be documented and must not be a failure of the server, and
the body must match the document for that status.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import httpx2
import jsonschema_rs
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from schemathesis import GenerationMode

from tests.support.server_process import ServerProcess, serving
from tests.torture.report import BUILD, Finding

Json = dict[str, Any]
Ask = Callable[..., "Future[httpx2.Response]"]

SEED = 20261121
TINY = ("--max-model-len", "32", "--max-client-batch-size", "4", "--num-kv-blocks", "64", "--sandbox-timeout", "1")
# Errors with a 5xx status that are no failures: a request's own deadline passed, or the queue is full.
ALLOWED_ERRORS = {(504, "deadline_exceeded"), (503, "overloaded")}
NUM_SENDERS = 4
MAX_EXAMPLES = 5
MAX_QUERY = 20_000  # characters; longer ones are cut, because they would only test the limit on headers


def run(cases_per_endpoint: int, seed: int = 0) -> list[Finding]:
    """Test each endpoint; the same seed sends the same requests."""
    BUILD.mkdir(parents=True, exist_ok=True)
    log = BUILD / "schemas.log"
    with TemporaryDirectory() as folder, serving(*TINY, "--batch-dir", folder, log=log) as server:
        findings = list(_fuzz(server, cases_per_endpoint, seed))
        server.wait_until_at_rest()
    _, found, traceback = log.read_text().partition("Traceback")
    return [*findings, Finding("tracebacks in the server's log", "none", traceback[-300:] or "none", not found)]


def _fuzz(server: ServerProcess, cases_per_endpoint: int, seed: int) -> Iterator[Finding]:
    api = server.client.get("/openapi.json").json()
    for result in schemathesis.openapi.from_dict(api).get_all_operations():
        operation = result.ok()
        if not (operation.body or operation.query):
            continue
        if any(body.media_type == "multipart/form-data" for body in operation.body):
            continue  # tests/servekit/api/test_multipart.py has forms of all kinds
        answers = Answers(api, api["paths"][operation.path][operation.method])
        started_s = time.monotonic()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            with ThreadPoolExecutor(NUM_SENDERS) as senders:
                ask = partial(senders.submit, server.client.request)
                for sent, answer in _asked(operation, mode, cases_per_endpoint // 2, seed, ask):
                    answers.check(sent, answer.result())
        yield answers.finding(f"{operation.method.upper()} {operation.path}", time.monotonic() - started_s)


def _asked(
    operation: Any, mode: GenerationMode, num_cases: int, seed: int, ask: Ask
) -> list[tuple[Json, Future[httpx2.Response]]]:
    """Return requests in the form that httpx2 takes, with futures of their answers."""
    content = operation.definition.raw.get("requestBody", {}).get("content", {})
    example: Json = content.get("application/json", {}).get("example", {"prompt": "Hello", "max_tokens": 8})
    made: list[tuple[Json, Future[httpx2.Response]]] = []

    @with_seed(SEED + seed)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="")
        for header in ("User-Agent", "Accept-Encoding", "X-Schemathesis-TestCaseId"):
            sent["headers"].pop(header, None)
        body = sent.pop("json", None)
        # A request without a prompt is refused before anything else is checked, so half of them get one.
        defaults = example if len(made) % 2 else {}
        if not content:
            sent["params"] = _cut(defaults | sent["params"])
        elif body is not None or "data" not in sent:
            sent["data"] = json.dumps(defaults | body if isinstance(body, dict) else body).encode()
        sent["content"] = sent.pop("data", None)
        sent = {name: value for name, value in sent.items() if value and name != "cookies"}
        made.append((sent, ask(**sent)))

    collect()
    return made


def _cut(params: Json) -> Json:
    room, kept = MAX_QUERY, {}
    for name, value in params.items():
        room -= len(quote(f"{name}={value}"))
        if room > 0:
            kept[name] = value
    return kept


class Answers:
    """The answers of one operation, and those that are not as documented."""

    def __init__(self, api: Json, operation: Json) -> None:
        self._statuses: Counter[int] = Counter()
        self._wrong: list[str] = []
        self._validators = {
            (status, kind): jsonschema_rs.validator_for({"components": api["components"], **content["schema"]})
            for status, shown in operation["responses"].items()
            for kind, content in shown.get("content", {}).items()
        }

    def check(self, sent: Json, response: httpx2.Response) -> None:
        self._statuses[response.status_code] += 1
        if (said := next(self._complaints(response), None)) is not None:
            shown = {name: value for name, value in sent.items() if name in ("params", "content")}
            self._wrong.append(f"{said}; asked with {str(shown)[:1500]}")

    def _complaints(self, response: httpx2.Response) -> Iterator[str]:
        status, kind = response.status_code, response.headers.get("content-type", "").partition(";")[0]
        validator = self._validators.get((str(status), kind))
        if validator is None:
            yield f"{status} as {kind} is not documented: {response.text[:200]}"
            return
        refusals = self._validators["400", "application/json"]
        bodies = _bodies(kind, response)
        if not bodies:
            yield "a stream of nothing"
        for body in bodies:
            refusal = body.get("error") if isinstance(body, dict) else None
            used = validator if refusal is None else refusals
            yield from (f"{status}: {error.message[:200]} in {str(body)[:200]}" for error in used.iter_errors(body))
            if isinstance(refusal, str):  # Ollama's form, which has no code
                refusal = {"message": refusal, "code": "internal_error" if status == 500 else "overloaded"}
            if status >= 500 and (status, refusal["code"]) not in ALLOWED_ERRORS:
                yield f"{status}: {refusal['message']}"
            if refusal is not None and refusal["code"] == "internal_error":
                yield f"an internal error: {refusal['message']}"

    def finding(self, what: str, elapsed_s: float) -> Finding:
        num_cases = self._statuses.total()
        counts = ", ".join(f"{count:,} x {status}" for status, count in sorted(self._statuses.items()))
        measured = f"{len(self._wrong)} of {num_cases:,} cases ({counts}; {num_cases / elapsed_s:.0f}/s)"
        for said in self._wrong[:MAX_EXAMPLES]:
            measured += f"<br>{said}"
        return Finding(f"{what}: answers that are not as documented", "0", measured, not self._wrong)


def _bodies(kind: str, response: httpx2.Response) -> list[Any]:
    """The JSON of an answer, or of each part of its stream."""
    if kind == "text/event-stream":
        return list(_events(response))
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in response.text.split("\n") if line]
    return [response.json()]


def _events(response: httpx2.Response) -> Iterator[Any]:
    """The JSON of each server-sent event."""
    for line in response.text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
