"""Models that embed and rerank on another server, as clients see them. A scripted server stands for the other one."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.applications import Starlette

from servekit.api.app import create_app
from servekit.api.auth.keys import parse_keys_file
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.errors import DeadlineExceeded, InvalidRequest, QueueFull, RemoteFailed, RemoteTimeout, RemoteUnavailable
from servekit.models.model_file import parse_model_file
from servekit.models.read_file import with_kinds
from servekit.models.several_models import SeveralModels
from servekit.remote.prediction_format import read_result
from servekit.remote.remote_predictor import RemotePredictor
from servekit.remote.settings import PredictorServerSettings
from servekit.requests.prediction import PredictionRequest
from tests.support.asgi import Answer, ask, bearer
from tests.support.scripted_server import Script, ScriptedServer, scripted_server

EMBED, RERANK, TEI = "/v1/embeddings", "/v1/rerank", "/rerank"


def packed(*values: float) -> bytes:
    return array("f", values).tobytes()


def embeddings(*values: float, num_tokens: int = 3) -> Script:
    data = [{"index": index, "embedding": b64encode(packed(each, 1.0)).decode()} for index, each in enumerate(values)]
    return [json.dumps({"data": data, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}).encode()]


def scores(*values: float) -> Script:
    results = [{"index": index, "relevance_score": each} for index, each in enumerate(values)]
    return [json.dumps({"results": results}).encode()]


@pytest.fixture
def remote() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


def models_of(remote: ScriptedServer, **settings: Any) -> SeveralModels:
    toml = f"""
    [[model]]
    id = "vectors"
    kind = "embed"
    model = "there"
    remote = {{ url = "{remote.url}/v1", max_batch_size = 2 }}
    [[model]]
    id = "order"
    kind = "rerank"
    model = "there"
    remote = {{ url = "{remote.url}/v1", dialect = "vllm" }}
    [[model]]
    id = "tei"
    kind = "rerank"
    model = "there"
    remote = {{ url = "{remote.url}", dialect = "tei" }}
    """
    config = ServeConfig(models="models.toml", **settings)
    file = with_kinds(parse_model_file(toml.encode(), "models.toml", config, "cpu"), "models.toml")
    return SeveralModels(config, file)


@pytest.fixture
async def app(remote: ScriptedServer) -> AsyncIterator[Starlette]:
    manager = models_of(remote)
    await manager.start()
    yield create_app(manager)
    await manager.stop()


async def post(app: Starlette, path: str, **fields: Any) -> Answer:
    return await ask(app, "POST", path, body=json.dumps(fields).encode())


async def test_embeddings_of_another_server_have_this_servers_form(app: Starlette, remote: ScriptedServer) -> None:
    remote.scripts[EMBED] = [embeddings(0.5, 0.25), embeddings(0.125, 1.0)]
    answer = json.loads((await post(app, "/v1/embeddings", model="vectors", input=["a", "b", "c", "d"])).body)
    got = sorted(each["embedding"][0] for each in answer["data"])  # which request came first is not known
    assert got == [0.125, 0.25, 0.5, 1.0] and [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    assert (answer["model"], answer["usage"]) == ("vectors", {"prompt_tokens": 6, "total_tokens": 6})
    sent = [body for path, body in remote.asked if path == EMBED]
    assert sorted(body["input"] for body in sent) == [["a", "b"], ["c", "d"]] and sent[0]["model"] == "there"


async def test_documents_are_ordered_by_the_scores_of_another_server(app: Starlette, remote: ScriptedServer) -> None:
    """The scores are not changed: that server has applied its activation."""
    remote.scripts[RERANK] = [scores(0.25, 2.5, -1.0)]
    fields = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2, "return_documents": True}
    answer = json.loads((await post(app, "/v1/rerank", model="order", **fields)).body)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 2.5, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0.25, "document": {"text": "a"}},
    ]
    remote.scripts[TEI] = [[json.dumps([{"index": 0, "score": 0.75}]).encode()]]
    answer = json.loads((await post(app, "/score", model="tei", text_1="q", text_2="a")).body)
    assert [each["score"] for each in answer["data"]] == [0.75]


async def test_models_of_other_kinds_and_parameters_are_refused(app: Starlette, remote: ScriptedServer) -> None:
    answer = await post(app, "/v1/embeddings", model="order", input="a")
    assert answer.status == 400 and b"it computes no embeddings. Please name 'vectors'" in answer.body
    answer = await post(app, "/v1/embeddings", model="vectors", input="a", prompt_name="query")
    assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "not_supported"
    listed = json.loads((await ask(app, "GET", "/v1/models")).body)["data"]
    assert {each["id"]: (each["kind"], each["state"]) for each in listed} == {
        "vectors": ("embed", "ready"),
        "order": ("rerank", "ready"),
        "tei": ("rerank", "ready"),
    }
    assert not [path for path, _ in remote.asked if path == EMBED]


# -- the engine --------------------------------------------------------------------------------------------------------

Start = Callable[..., Any]
TWO = PredictionRequest(inputs=["a", "b"], param="input")


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    engines: list[RemotePredictor] = []

    async def start_engine(server: ScriptedServer, config: dict[str, Any] | None = None, **settings: Any) -> Any:
        engine = RemotePredictor(
            ServeConfig(model="there", served_model_name="here", kind="embed", **(config or {})),
            PredictorServerSettings(url=f"{server.url}/v1", **settings),
        )
        engines.append(engine)
        await engine.start()
        return engine

    yield start_engine
    for engine in engines:
        await engine.stop()
        sender = engine.sender
        assert not engine._live and not sender.num_connections and not sender.num_waiting and not sender.places.total


async def results(engine: RemotePredictor, request: PredictionRequest = TWO, caller: Caller | None = None) -> Any:
    state = await engine.submit(request, caller or Caller())
    try:
        return await state.results()
    finally:
        state.abort()
        tasks = [each.task for each in engine._live if each.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)  # the end is counted a moment after the results are there


def ended(engine: RemotePredictor, outcome: str) -> float:
    text = generate_latest(engine.metrics.registry).decode()
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("servekit_prediction_items_total") and f'"{outcome}"' in line
    ]
    return float(line.rpartition(" ")[2])


async def test_a_busy_server_is_asked_again_and_each_input_counts_once(remote: ScriptedServer, start: Start) -> None:
    engine = await start(remote)
    remote.scripts[EMBED] = [[b"{}"], embeddings(0.5, 0.25)]  # the first one is not an answer
    with pytest.raises(RemoteFailed, match="invalid answer"):
        await results(engine)
    assert await results(engine) == [packed(0.5, 1.0), packed(0.25, 1.0)]
    assert (ended(engine, "computed"), ended(engine, "failed")) == (2, 2)
    assert engine.model.dimensions == 2, "the memory of later answers is counted with what has come"
    remote.statuses[EMBED] = 503, {"Retry-After": "0"}
    with pytest.raises(RemoteUnavailable, match="is busy"):
        await results(engine)
    assert len(remote.asked) == 3 + 3  # the models, two requests, and one with two retries


async def test_servers_message_about_an_input_reaches_the_client(remote: ScriptedServer, start: Start) -> None:
    engine = await start(remote)
    remote.scripts[EMBED] = [[json.dumps({"error": {"message": "too many tokens"}}).encode()]]
    remote.statuses[EMBED] = 400, {}
    with pytest.raises(InvalidRequest, match="refused the request: too many tokens"):
        await results(engine)


async def test_deadlines_timeouts_and_clients_that_leave_end_the_request(remote: ScriptedServer, start: Start) -> None:
    never = threading.Event()
    remote.scripts[EMBED] = [[never, b"{}"]]
    engine = await start(remote, answer_timeout=0.2, max_retries=0)
    with pytest.raises(DeadlineExceeded, match="deadline_ms 30"):
        await results(engine, PredictionRequest(inputs=["a"], param="input", deadline_ms=30))
    with pytest.raises(RemoteTimeout, match=r"did not answer within 0\.2 s"):
        await results(engine, PredictionRequest(inputs=["a"], param="input"))
    engine = await start(remote, max_batch_size=1)
    state = await engine.submit(TWO)
    state.abort()  # before anything was sent
    state = await engine.submit(TWO, Caller("tenant", "some-id"))
    await asyncio.to_thread(remote.wait_for, 6)  # two lists of models, two requests before, and one for each input
    assert await engine.abort_request("tenant", "some-id") == 2
    with pytest.raises(InvalidRequest, match="aborted"):
        await state.results()
    await asyncio.to_thread(remote.wait_for, 6, 4)
    assert ended(engine, "aborted") == 2 and ended(engine, "failed") == 2
    never.set()


async def test_requests_that_wait_for_a_connection_are_bounded(remote: ScriptedServer, start: Start) -> None:
    hold = threading.Event()
    remote.scripts[EMBED] = [[hold, *embeddings(0.5)]]
    engine = await start(remote, {"max_num_queued_reqs": 2}, max_connections=1, max_batch_size=1)
    one = PredictionRequest(inputs=["a"], param="input")
    first = await engine.submit(one)
    await asyncio.sleep(0.05)  # it has the connection
    second = await engine.submit(one)
    with pytest.raises(QueueFull, match="the queue is full"):
        await engine.submit(TWO)
    with pytest.raises(InvalidRequest, match="asks for 2 answers; the limit is 1"):
        await engine.submit(TWO, Caller(max_answers=1))
    hold.set()
    assert await first.results() == await second.results() == [packed(0.5, 1.0)]


async def test_answer_that_is_too_long_is_no_failure_of_the_server(
    remote: ScriptedServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant's large batches must not open the breaker for all."""
    monkeypatch.setattr("servekit.remote.remote_predictor.MAX_ANSWER_BYTES", 50)
    remote.scripts[EMBED] = [embeddings(0.5, 0.25)]
    engine = await start(remote, failures_to_open=1)
    for _ in range(2):
        with pytest.raises(RemoteFailed, match=r"more than 50 bytes; the operator can lower max_batch_size \([0-9]+\)"):
            await results(engine)


async def test_text_that_is_not_valid_unicode_is_refused_and_the_message_says_what_to_do(
    remote: ScriptedServer, start: Start
) -> None:
    engine = await start(remote)
    with pytest.raises(InvalidRequest, match=r"not valid Unicode \(surrogates\); remove them"):
        await results(engine, PredictionRequest(inputs=["a\ud800"], param="input"))


async def test_event_loop_runs_while_a_large_answer_is_read(
    remote: ScriptedServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps, num_steps_at = 0, []

    def counting(value: Any, kind: Any) -> bytes:
        num_steps_at.append(num_steps)
        return read_result(value, kind)

    async def step() -> None:
        nonlocal num_steps
        while True:
            num_steps += 1
            await asyncio.sleep(0)

    monkeypatch.setattr("servekit.remote.remote_predictor.read_result", counting)
    data = [{"index": index, "embedding": [float(index)] * 20_000} for index in range(4)]
    remote.scripts[EMBED] = [[json.dumps({"data": data}).encode()]]
    engine = await start(remote)
    stepping = asyncio.create_task(step())
    assert await results(engine, PredictionRequest(inputs=["a"] * 4, param="input")) == [
        packed(*[float(index)] * 20_000) for index in range(4)
    ]
    stepping.cancel()
    assert len(set(num_steps_at)) == 4


async def test_tokens_that_the_server_counts_beyond_the_estimate_are_charged(remote: ScriptedServer) -> None:
    """And those of the estimate, here 100, if it counts fewer."""
    keys = parse_keys_file(b'[[key]]\nkey = "one"\ntenant = "t"\ntokens_per_minute = 1000\n', "keys.toml")
    manager = models_of(remote, api_keys_file="keys.toml")
    await manager.start()
    app = create_app(manager, keys)
    for num_counted, status in ((950, 200), (1, 200), (1, 429)):
        remote.scripts[EMBED] = [embeddings(0.5, num_tokens=num_counted)]
        body = json.dumps({"model": "vectors", "input": "a" * 400}).encode()
        assert (await ask(app, "POST", "/v1/embeddings", bearer("one"), body=body)).status == status
    await manager.stop()
