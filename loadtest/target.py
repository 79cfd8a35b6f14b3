"""The server that a run sends requests to, and how."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from loadtest.errors import LoadTestError


class ApiFormat(StrEnum):
    """A wire format. All stream, except GENERATE."""

    GENERATE_STREAM = "generate_stream"  # servekit's own: POST /generate_stream {"prompt": ...}
    GENERATE = "generate"  # whole answers, to a list of prompts: POST /generate {"prompts": [...]}
    COMPLETIONS = "completions"  # POST /v1/completions, streamed
    CHAT = "chat"  # POST /v1/chat/completions, streamed
    TGI = "tgi"  # POST /generate_stream {"inputs": ...}


class Target(Struct, frozen=True):
    """One server, at one or more addresses; each address gives the client another set of ports."""

    urls: list[str]  # without a path: http://127.0.0.1:8000
    api: ApiFormat
    model: str | None = None  # model name in requests; None uses the first one of /v1/models
    api_key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # added to every body, such as {"temperature": 0}
    batch_size: int = 1  # prompts in one request, with GENERATE
    timeout_s: float = 600.0  # of one request, from its start
    max_connections: int | None = None  # of the client; waiting for a free one counts as latency
    keep_alive: bool = True  # send further requests over an open connection; False: a connection for each request
    verifies: bool = False  # compare every answer with servekit's simulated model (docs/simulated_model.md)


def check_target(target: Target) -> None:
    """Raise LoadTestError for settings that contradict each other."""
    if not target.urls:
        raise LoadTestError("no URL is given; use --url, for example http://127.0.0.1:8000")
    if target.verifies and target.api is ApiFormat.CHAT:
        raise LoadTestError(
            "--verify does not work with --api chat, because the server's chat template changes the prompt; use "
            "another --api"
        )
    if target.batch_size < 1 or (target.batch_size > 1 and target.api is not ApiFormat.GENERATE):
        raise LoadTestError(
            f"--batch-size {target.batch_size}: it must be at least 1, and 1 unless --api is {ApiFormat.GENERATE.value}"
        )
    if target.api is ApiFormat.GENERATE and "max_tokens" in target.fields:
        raise LoadTestError(
            f"--fields sets max_tokens to {target.fields['max_tokens']}, but with --api {ApiFormat.GENERATE.value} "
            "the plan has to set it, to check the token counts of answers; use the workload parameter output=N instead"
        )
    if not target.timeout_s > 0.0:
        raise LoadTestError(f"--timeout {target.timeout_s:g}: it must be above 0 s")
    if target.max_connections is not None and target.max_connections < 1:
        raise LoadTestError(f"--max-connections {target.max_connections}: it must be at least 1")
