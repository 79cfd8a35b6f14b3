"""What an API process says of the engine before it has heard of it, and when it hears nothing more."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec import Struct

from servekit.api_processes import engine_client
from servekit.api_processes import messages as ms
from servekit.api_processes.engine_client import EngineClient
from servekit.api_processes.remote_adapters import RemoteAdapters
from servekit.config import ServeConfig
from servekit.errors import InternalError, WorkerNotReady
from servekit.requests.generation import GenerationRequest, Prompt, Sampling


def make_client() -> tuple[EngineClient, list[Struct]]:
    sent: list[Struct] = []
    return EngineClient(ServeConfig(api_processes=2), sent.append), sent


async def test_it_is_loading_until_it_can_prepare_requests_itself() -> None:
    client, sent = make_client()
    assert client.state == "loading" and client.is_healthy and client.worker is None
    client.receive(ms.EngineStatus("ready", "serving", True))
    assert client.state == "loading" and client.stage == "loading the tokenizer"
    assert not await client.probe_readiness() and not sent
    for part in ("tokenizer", "input_processor", "scheduler_config"):
        with pytest.raises(WorkerNotReady, match="not ready to serve: loading the tokenizer"):
            getattr(client, part)
    client._input_processor = cast(Any, object())
    assert client.state == "ready" and client.stage == "serving"
    client.receive(ms.EngineStatus("draining", "serving", True))
    assert client.state == "draining"


def test_an_engine_that_is_silent_or_says_so_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = make_client()
    now_s = client.now()
    monkeypatch.setattr(client, "now", lambda: now_s)
    client.receive(ms.EngineStatus("ready", "serving", False))
    assert not client.is_healthy
    client.receive(ms.EngineStatus("ready", "serving", True))
    now_s += ms.SILENCE_TIMEOUT_S - 1
    assert client.is_healthy
    now_s += 1
    assert not client.is_healthy


async def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    client, _ = make_client()
    client.receive(ms.Reply(99))
    client.receive(ms.RequestFailed(5, ms.Failure("WorkerLost", "gone")))
    client.receive(ms.PromptLogprobsPart(5, 0, []))


async def test_what_the_engine_process_gives_too_late_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "ANSWER_TIMEOUT_S", 0.01)
    client, sent = make_client()
    with pytest.raises(InternalError, match="did not answer within"):
        await client.take_places(GenerationRequest(prompts=[Prompt("a", "prompt")], sampling=Sampling()))
    reserve, release = sent
    assert isinstance(reserve, ms.ReservePlaces) and release == ms.ReleaseRequest(reserve.request)
    with pytest.raises(InternalError, match="did not answer within"):
        await RemoteAdapters(client).wait_for_use("sql", "law")
    use, release = sent[2:]
    assert isinstance(use, ms.UseAdapter) and use.tenant == "law" and release == ms.ReleaseAdapter(use.use)
