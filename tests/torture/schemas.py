"""Requests that Schemathesis makes of the server's own /openapi.json, thousands for each route that takes anything.

Half of them are what the document allows and half what it forbids. A real server gets them, over HTTP: making a case
takes longer than answering it, and both go on at the same time, on a core each. Its context is a few tokens, so that
what it accepts is short. Whatever the answer, its status must be documented and none of the server's own failures, and
its body what the document says of that status.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx2
import jsonschema_rs
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from schemathesis import GenerationMode

from tests.server_process import ServerProcess, serving
from tests.torture.report import BUILD, Finding

Json = dict[str, Any]
Ask = Callable[..., "Future[httpx2.Response]"]

SEED = 20261121
TINY = ("--max-model-len", "32", "--max-client-batch-size", "4", "--num-kv-blocks", "64", "--sandbox-timeout", "1")
# What the server may say of itself: that a request's own deadline has passed, and that there is too much to do.
FAIR = {(504, "deadline_exceeded"), (503, "overloaded")}
NUM_SENDERS = 4
MAX_TOLD = 5
MAX_QUERY = 20_000  # characters; longer ones are cut, for they would meet the bound on heads and nothing else


def run(cases_per_endpoint: int, seed: int = 0) -> list[Finding]:
    """For each endpoint, what was sent and what came back; with the same seed, the same is sent."""
    BUILD.mkdir(parents=True, exist_ok=True)
    log = BUILD / "schemas.log"
    with serving(*TINY, log=log) as server:
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
    """Requests as httpx takes them, and the answers to come."""
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
        # What names no prompt is refused for that, and nothing else of it is looked at; so half of them get one.
        least = example if len(made) % 2 else {}
        if not content:
            sent["params"] = _cut(least | sent["params"])
        elif body is not None or "data" not in sent:
            sent["data"] = json.dumps(least | body if isinstance(body, dict) else body).encode()
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
    """What one operation answered, and what of it was not as documented."""

    def __init__(self, api: Json, operation: Json) -> None:
        self._statuses: Counter[int] = Counter()
        self._wrong: list[str] = []
        self._validators = {
            (status, kind): jsonschema_rs.validator_for({"components": api["components"], **content["schema"]})
            for status, told in operation["responses"].items()
            for kind, content in told.get("content", {}).items()
        }

    def check(self, sent: Json, response: httpx2.Response) -> None:
        self._statuses[response.status_code] += 1
        if (said := next(self._complaints(response), None)) is not None:
            told = {name: value for name, value in sent.items() if name in ("params", "content")}
            self._wrong.append(f"{said}; asked with {str(told)[:1500]}")

    def _complaints(self, response: httpx2.Response) -> Iterator[str]:
        status, kind = response.status_code, response.headers.get("content-type", "").partition(";")[0]
        validator = self._validators.get((str(status), kind))
        if validator is None:
            yield f"{status} as {kind} is not documented: {response.text[:200]}"
            return
        refusals = self._validators["400", "application/json"]
        bodies = list(_events(response)) if kind == "text/event-stream" else [response.json()]
        if not bodies:
            yield "a stream of nothing"
        for body in bodies:
            refusal = body.get("error") if isinstance(body, dict) else None
            used = validator if refusal is None else refusals
            yield from (f"{status}: {error.message[:200]} in {str(body)[:200]}" for error in used.iter_errors(body))
            if status >= 500 and (status, refusal["code"]) not in FAIR:
                yield f"{status}: {refusal['message']}"
            if refusal is not None and refusal["code"] == "internal_error":
                yield f"an internal error: {refusal['message']}"

    def finding(self, what: str, elapsed_s: float) -> Finding:
        num_cases = self._statuses.total()
        counts = ", ".join(f"{count:,} x {status}" for status, count in sorted(self._statuses.items()))
        measured = f"{len(self._wrong)} of {num_cases:,} cases ({counts}; {num_cases / elapsed_s:.0f}/s)"
        for said in self._wrong[:MAX_TOLD]:
            measured += f"<br>{said}"
        return Finding(f"{what}: answers that are not as documented", "0", measured, not self._wrong)


def _events(response: httpx2.Response) -> Iterator[Any]:
    """The JSON of each server-sent event."""
    for line in response.text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
