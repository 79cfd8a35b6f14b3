"""Whom a run asks, and how."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, field


class Door(StrEnum):
    """A wire format. Each streams, but the two that are batched."""

    GENERATE_STREAM = "generate_stream"  # servekit's own: POST /generate_stream {"prompt": ...}
    GENERATE = "generate"  # whole answers, to a list of prompts: POST /generate {"prompts": [...]}
    COMPLETIONS = "completions"  # POST /v1/completions, streamed
    CHAT = "chat"  # POST /v1/chat/completions, streamed
    TGI = "tgi"  # POST /generate_stream {"inputs": ...}


class Target(Struct, frozen=True):
    """One server, at one or more addresses: each address has ports of its own for clients to come from."""

    urls: list[str]  # without a path: http://127.0.0.1:8000
    door: Door
    model: str | None = None  # what the request names; None asks /v1/models
    api_key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # more of every body, such as {"temperature": 0}
    batch_size: int = 1  # prompts in one request, where the door takes several
    timeout_s: float = 600.0  # of one request, from its start
    max_connections: int | None = None  # of the client: who finds none free waits, and the wait counts as latency
    verifies: bool = False  # every answer against what servekit's simulated model says (docs/simulated_model.md)
