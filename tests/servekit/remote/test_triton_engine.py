"""A model of a Triton server, as clients of this server see it. A small server of the same protocol stands for it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec import Raw
from prometheus_client import generate_latest
from starlette.applications import Starlette

from servekit.api.app import create_app
from servekit.api.auth.keys import parse_keys_file
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RemoteFailed,
    RemoteTimeout,
    RemoteUnavailable,
    ServekitError,
    WorkerNotReady,
)
from servekit.models.model_file import parse_model_file
from servekit.models.several_models import SeveralModels
from servekit.remote.circuit_breaker import State
from servekit.remote.kserve_format import read_answer
from servekit.remote.settings import TritonSettings
from servekit.remote.triton_engine import MAX_INLINE_BYTES, TritonEngine
from servekit.requests.inference import InferenceRequest, Tensor
from tests.support.asgi import Answer, ask, bearer
from tests.support.pauses import pause
from tests.support.triton_server import TritonServer, triton_server


@pytest.fixture
def triton() -> Iterator[TritonServer]:
    with triton_server() as server:
        yield server
        if server.hold is not None:
            server.hold.set()


class Started:
    """Engines that are stopped when the test ends."""

    def __init__(self) -> None:
        self.engines: list[TritonEngine] = []

    async def __call__(self, server: TritonServer, model: str = "sum", config: Any = None, **settings: Any) -> Any:
        engine = TritonEngine(
            ServeConfig(model=model, served_model_name="here", **(config or {})),
            TritonSettings(url=server.url, **settings),
        )
        self.engines.append(engine)
        await engine.start()
        return engine


@pytest.fixture
async def start() -> AsyncIterator[Started]:
    started = Started()
    yield started
    for engine in started.engines:
        await engine.stop()
        sender = engine.sender
        assert not engine._live and not sender.num_connections and not sender.num_waiting and not sender.places.total


def tensor(name: str, shape: list[int], values: list[Any], datatype: str = "FP32") -> Tensor:
    return Tensor(name, shape, datatype, Raw(json.dumps(values).encode()))


SUM = InferenceRequest(tensors=[tensor("A", [1, 2], [1, 2]), tensor("B", [1, 2], [10, 20])])


def values_of(outputs: list[Tensor]) -> dict[str, Any]:
    return {each.name: json.loads(bytes(each.data)) for each in outputs}


def metrics_of(engine: TritonEngine) -> dict[str, float]:
    found = {}
    for line in generate_latest(engine.metrics.registry).decode().splitlines():
        if line.startswith("servekit_"):
            name, _, value = re.sub(r'model_name="here",?', "", line).rpartition(" ")
            found[name.removeprefix("servekit_").replace(",}", "}").replace("{}", "")] = float(value)
    return found


# -- POST /predict -----------------------------------------------------------------------------------------------------

KEYS = """
[[key]]
key = "searching"
tenant = "search"
requests_per_minute = 2
[[key]]
key = "other"
tenant = "other"
"""


@pytest.fixture
async def app(triton: TritonServer) -> AsyncIterator[Starlette]:
    toml = f"""
    default = "lengths"
    [[model]]
    id = "adder"
    aliases = ["plus"]
    kind = "triton"
    model = "sum"
    tenants = ["search"]
    remote = {{ url = "{triton.url}" }}
    [[model]]
    id = "lengths"
    kind = "triton"
    model = "lengths"
    remote = {{ url = "{triton.url}" }}
    """
    config = ServeConfig(models="models.toml")
    manager = SeveralModels(config, parse_model_file(toml.encode(), "models.toml", config, "cpu"))
    await manager.start()
    yield create_app(manager, parse_keys_file(KEYS.encode(), "keys.toml"))
    await manager.stop()


TENSORS = [
    {"name": "A", "shape": [1, 2], "datatype": "FP32", "data": [[1.5, 2]]},
    {"name": "B", "shape": [1, 2], "datatype": "FP32", "data": [10, 20]},
]


async def predict(app: Starlette, key: str = "other", **fields: Any) -> Answer:
    return await ask(app, "POST", "/predict", bearer(key), body=json.dumps(fields).encode())


async def test_tensors_and_texts_are_answered_with_tensors(app: Starlette, triton: TritonServer) -> None:
    answer = await predict(app, "searching", model="plus", tensors=TENSORS)
    assert json.loads(answer.body) == {
        "model": "adder",
        "outputs": [
            {"name": "SUM", "shape": [1, 2], "datatype": "FP32", "data": [11.5, 22]},
            {"name": "LARGEST", "shape": [1], "datatype": "FP32", "data": [22]},
        ],
    }
    answer = await predict(app, "searching", model="adder", tensors=TENSORS, outputs=["LARGEST"])
    assert [each["name"] for each in json.loads(answer.body)["outputs"]] == ["LARGEST"]
    for texts, shape in (("blüe", [1, 1]), (["blüe", "x"], [2, 1])):
        (output,) = json.loads((await predict(app, model="lengths", input=texts)).body)["outputs"]
        assert output["shape"] == shape and output["data"] == [5, 1][: shape[0]]


async def test_large_tensors_pass_through_the_body_process(app: Starlette) -> None:
    texts = ["x" * 100] * 2000
    large = [{"name": "TEXT", "shape": [2000, 1], "datatype": "BYTES", "data": texts}]
    answer = await predict(app, model="lengths", tensors=large)
    (output,) = json.loads(answer.body)["outputs"]
    assert output["data"] == [100] * 2000
    shape = [1] * 70_000
    answer = await predict(app, model="lengths", tensors=[{**large[0], "shape": shape}])
    assert answer.status == 400 and "names and shapes of tensors" in answer.error["message"]


async def test_large_answers_are_decoded_in_the_body_process(
    app: Starlette, triton: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To decode 16 MiB on the event loop would hold it for tens of milliseconds."""

    def read_small_answer(answer: bytes) -> Any:
        assert len(answer) <= MAX_INLINE_BYTES
        return read_answer(answer)

    monkeypatch.setattr("servekit.remote.triton_engine.read_answer", read_small_answer)
    outputs = [
        {"name": "P", "shape": [300, 100], "datatype": "FP32", "data": [[0.25] * 100] * 300},
        {"name": "N", "shape": [0], "datatype": "INT64", "data": []},
        {"name": "T", "shape": [1], "datatype": "BYTES", "data": ["blüe \0" * 20_000]},
    ]
    triton.failures = [(200, {"outputs": outputs}), (200, {"outputs": 1, "more": "a" * 70_000})]
    answer = await predict(app, model="lengths", input="x")
    assert answer.status == 200 and json.loads(answer.body) == {"model": "lengths", "outputs": outputs}
    assert answer.headers["content-length"] == str(len(answer.body))
    answer = await predict(app, model="lengths", input="x")
    assert answer.status == 502 and "sent an invalid answer: outputs" in answer.error["message"]
    triton.failures = [(200, [{"a": "b" * 70_000}])]
    answer = await predict(app, model="lengths", input="x")
    assert answer.status == 502 and "sent an invalid answer: it" in answer.error["message"]


async def test_keys_and_their_limits_hold(app: Starlette, triton: TritonServer) -> None:
    answer = await predict(app, "other", model="adder", tensors=TENSORS)
    assert answer.status == 404 and "lengths" in answer.error["message"], "the model is for another tenant"
    statuses = [(await predict(app, "searching", model="adder", tensors=TENSORS)).status for _ in range(3)]
    assert statuses == [200, 200, 429] and triton.num_inferences() == 2


async def test_what_such_a_model_cannot_do_is_refused_in_a_sentence(app: Starlette, triton: TritonServer) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "send one of"),
        ({"tensors": []}, "send one of tensors and input"),
        ({"tensors": TENSORS, "input": "x"}, "send one of tensors and input"),
        ({"input": []}, "empty"),
        ({"input": "x", "top_k": 2}, "top_k is for models that classify"),
        ({"image": "aGk="}, "image is for models that classify"),
        ({"inputs": "x"}, "inputs is for models that classify"),
        ({"tensors": [{"name": "A"}]}, "tensors[0].shape is missing"),
        ({"tensors": TENSORS}, "unexpected inference input 'A'"),  # this the server says
    ]
    for fields, message in refused:
        answer = await predict(app, model="lengths", **fields)
        assert answer.status == 400 and message in answer.error["message"], (fields, answer.body)
    answer = await ask(
        app,
        "POST",
        "/v1/chat/completions",
        bearer("other"),
        body=b'{"model": "lengths", "messages": [{"role": "user", "content": "x"}]}',
    )
    assert answer.status == 400 and "computes tensors: POST /predict" in answer.error["message"]
    answer = await ask(app, "POST", "/api/show", bearer("other"), body=b'{"model": "lengths"}')
    assert answer.status == 400


async def test_model_lists_show_what_it_is(app: Starlette) -> None:
    models = json.loads((await ask(app, "GET", "/v1/models", bearer("other"))).body)["data"]
    assert [(each["id"], each["kind"], each["state"]) for each in models] == [("lengths", "infer", "ready")]
    answer = await ask(app, "GET", "/info", bearer("other"))
    assert answer.status == 200 and b'"name":"TEXT","datatype":"BYTES"' in answer.body
    answer = await ask(app, "GET", "/ready")
    assert answer.status == 200


# -- load and unload ---------------------------------------------------------------------------------------------------


async def test_model_is_loaded_and_unloaded_there_where_this_server_controls_it(start: Started) -> None:
    with triton_server(loaded=(), is_explicit=True) as server:
        engine = await start(server, model_control_mode="explicit")
        assert server.loaded == {"sum"}
        assert values_of(await engine.infer(SUM))["SUM"] == [11, 22]
        await engine.stop()
        assert server.loaded == set()


async def test_model_that_is_not_there_is_explained(start: Started, triton: TritonServer) -> None:
    with pytest.raises(RemoteFailed, match="does not serve the model 'nothing': Request for unknown model"):
        await start(triton, "nothing")
    with pytest.raises(RemoteFailed, match="explicit model load / unload is not allowed"):
        await start(triton, model_control_mode="explicit")
    with triton_server(loaded=(), is_explicit=True) as server, pytest.raises(RemoteFailed, match="failed to load"):
        await start(server, "nothing", model_control_mode="explicit")


async def test_server_that_is_down_at_the_start_is_unreachable(start: Started) -> None:
    with triton_server() as server:
        pass
    with pytest.raises(RemoteUnavailable, match="cannot be reached"):
        await start(server)


async def test_model_that_the_server_lost_is_loaded_again() -> None:
    with triton_server(loaded=(), is_explicit=True) as server:
        toml = f"""
        [[model]]
        id = "here"
        kind = "triton"
        model = "sum"
        remote = {{ url = "{server.url}", model_control_mode = "explicit" }}
        """
        config = ServeConfig(models="models.toml")
        now_s = 0.0
        manager = SeveralModels(config, parse_model_file(toml.encode(), "models.toml", config, "cpu"), lambda: now_s)
        await manager.start()
        model = manager.find("here", Caller())
        engine: Any = model.engine
        server.loaded.clear()  # it has restarted
        with pytest.raises(WorkerNotReady, match="does not serve it any more"):
            await engine.infer(SUM)
        while model.state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerNotReady, match="does not serve it any more") as refused:
            await model.wait_for_use(Caller())
        assert refused.value.retry_after_s == 5
        now_s = 6.0
        use = await model.wait_for_use(Caller())
        assert server.loaded == {"sum"}
        assert values_of(await use.engine.infer(SUM))["LARGEST"] == [22]  # type: ignore[attr-defined]
        use.release()
        await manager.stop()


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "told", "kind", "result", "num_tries"),
    [
        (400, "the shape is wrong", InvalidRequest, "refused", 1),
        (401, "no", RemoteFailed, "refused", 1),
        (500, "oh no", RemoteFailed, "failed", 3),
        (503, "Exceeds maximum queue size", RemoteUnavailable, "busy", 3),
        (504, "late", RemoteTimeout, "failed", 3),
        (200, {"outputs": 1}, RemoteFailed, "failed", 1),
    ],
)
async def test_refusals_of_the_server_become_our_errors(
    triton: TritonServer,
    start: Started,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    told: Any,
    kind: type[ServekitError],
    result: str,
    num_tries: int,
) -> None:
    monkeypatch.setattr("servekit.remote.failure._seconds", lambda told: 0.01 if told else None)
    engine = await start(triton)
    triton.failures = [(status, told)] * num_tries
    with pytest.raises(ServekitError) as caught:
        await engine.infer(SUM)
    assert type(caught.value) is kind
    assert status in (200, 401) or told in caught.value.message
    metrics = metrics_of(engine)
    assert metrics[f'remote_requests_total{{result="{result}"}}'] == num_tries == triton.num_inferences()
    assert metrics['prediction_items_total{outcome="failed"}'] == 1
    assert values_of(await engine.infer(SUM))["LARGEST"] == [22]


async def test_a_name_that_a_client_chose_does_not_end_the_engine(triton: TritonServer, start: Started) -> None:
    engine = await start(triton)
    triton.failures = [(400, "unexpected inference input 'Request for unknown model' for model 'sum'")]
    with pytest.raises(InvalidRequest, match="unexpected inference input"):
        await engine.infer(SUM)
    assert engine.state == "ready" and values_of(await engine.infer(SUM))["LARGEST"] == [22]


async def test_request_that_failed_once_is_sent_again(triton: TritonServer, start: Started) -> None:
    engine = await start(triton)
    triton.failures = [(500, "once")]
    assert values_of(await engine.infer(SUM))["SUM"] == [11, 22]
    assert metrics_of(engine)["remote_retries_total"] == 1


async def test_server_that_fails_opens_the_breaker_and_a_probe_closes_it(triton: TritonServer, start: Started) -> None:
    engine = await start(triton, failures_to_open=2, max_retries=0, cooldown=1.2)
    triton.failures = [(502, "oh no")] * 2
    for _ in range(2):
        with pytest.raises(RemoteFailed):
            await engine.infer(SUM)
    assert engine.sender.breaker.state is State.OPEN and engine.state == "recovering"
    with pytest.raises(RemoteUnavailable, match="failed 2 times or more in a row"):
        await engine.infer(SUM)
    assert triton.num_inferences() == 2 and not await engine.probe_readiness()
    await asyncio.sleep(1.3)
    assert values_of(await engine.infer(SUM))["LARGEST"] == [22]
    assert engine.sender.breaker.state is State.CLOSED and await engine.probe_readiness()


async def test_model_whose_code_fails_for_some_inputs_does_not_open_the_breaker_for_all_tenants(
    triton: TritonServer, start: Started
) -> None:
    engine = await start(triton, failures_to_open=2, max_retries=0)
    triton.failures = [(500, "Failed to process the request(s) for model instance 'sum', message: ValueError: x")] * 4
    for _ in range(4):
        with pytest.raises(RemoteFailed, match="ValueError: x"):
            await engine.infer(SUM, Caller("one"))
    assert engine.sender.breaker.state is State.CLOSED
    assert metrics_of(engine)['remote_requests_total{result="failed"}'] == 4
    assert values_of(await engine.infer(SUM, Caller("other")))["LARGEST"] == [22]


@pytest.mark.parametrize("num_bytes", [10, MAX_INLINE_BYTES])
async def test_invalid_answers_open_the_breaker_whatever_their_size(
    triton: TritonServer, start: Started, num_bytes: int
) -> None:
    engine = await start(triton, failures_to_open=2, max_retries=0)
    triton.failures = [(200, {"outputs": 1, "more": "a" * num_bytes})] * 2
    for _ in range(2):
        with pytest.raises(RemoteFailed, match="sent an invalid answer"):
            await engine.infer(SUM)
    assert engine.sender.breaker.state is State.OPEN
    assert metrics_of(engine)['remote_requests_total{result="failed"}'] == 2


async def test_silent_server_is_a_timeout_and_is_not_asked_again(triton: TritonServer, start: Started) -> None:
    engine = await start(triton, answer_timeout=0.2)
    triton.hold = threading.Event()
    with pytest.raises(RemoteTimeout, match=r"within 0\.2 s \(answer_timeout\)"):
        await engine.infer(SUM)
    assert triton.num_inferences() == 1


async def test_a_pause_of_the_container_is_not_silence_of_the_server(
    triton: TritonServer, start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(triton)
    triton.hold = threading.Event()
    running = asyncio.create_task(engine.infer(SUM))
    await wait_for(triton, 1)
    pause(monkeypatch, 3600.0)
    await asyncio.sleep(0.1)
    triton.hold.set()
    assert values_of(await running)["SUM"] == [11, 22]


async def test_answer_that_is_too_long_is_refused(
    triton: TritonServer, start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servekit.remote.triton_engine.MAX_ANSWER_BYTES", 50)
    engine = await start(triton, failures_to_open=1)
    for _ in range(2):  # the breaker is for a server that does not work
        with pytest.raises(RemoteFailed, match="more than 50 bytes"):
            await engine.infer(SUM)


async def wait_for(triton: TritonServer, num_inferences: int) -> None:
    async with asyncio.timeout(30):
        while triton.num_inferences() < num_inferences:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_ends_of_requests_that_run_there(triton: TritonServer, start: Started) -> None:
    """By their deadline, by their client, by an operator, and by the end of this server."""
    engine = await start(triton)
    triton.hold = threading.Event()
    with pytest.raises(DeadlineExceeded):
        await engine.infer(InferenceRequest(tensors=SUM.tensors, deadline_ms=50))
    leaving = asyncio.create_task(engine.infer(SUM))
    await wait_for(triton, 2)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert leaving.cancelled()
    aborted = asyncio.create_task(engine.infer(SUM, Caller(tenant="a", request_id="7")))
    await wait_for(triton, 3)
    assert await engine.abort_request("b", "7") == 0 and await engine.abort_request("a", "7") == 1
    with pytest.raises(InvalidRequest, match="was aborted"):
        await aborted
    last = asyncio.create_task(engine.infer(SUM))
    await wait_for(triton, 4)
    await engine.stop()
    with pytest.raises(ServekitError, match="shutting down"):
        await last
    with pytest.raises(ServekitError, match="shutting down"):
        await engine.infer(SUM)
    metrics = metrics_of(engine)
    outcomes = ("expired", "aborted", "failed", "computed")
    assert [metrics[f'prediction_items_total{{outcome="{each}"}}'] for each in outcomes] == [1, 1, 2, 0]


async def test_an_inference_can_be_ended_while_its_answer_is_decoded(triton: TritonServer, start: Started) -> None:
    engine, is_decoding = await start(triton), asyncio.Event()

    async def decode(_: bytearray) -> list[Tensor]:
        is_decoding.set()
        await asyncio.Event().wait()
        raise AssertionError

    triton.failures = [(200, {"outputs": [], "more": "a" * MAX_INLINE_BYTES})]
    running = asyncio.create_task(engine.infer(SUM, Caller(tenant="a", request_id="7"), decode))
    async with asyncio.timeout(30):
        await is_decoding.wait()
        assert not engine.sender.num_connections, "others may use the connection"
        assert await engine.abort_request("a", "7") == 1
        with pytest.raises(InvalidRequest, match="was aborted"):
            await running
    assert metrics_of(engine)['remote_requests_total{result="aborted"}'] == 1


async def test_queue_is_bounded_and_texts_are(triton: TritonServer, start: Started) -> None:
    config = {"max_num_queued_reqs": 1, "max_client_batch_size": 2}
    engine = await start(triton, "lengths", config, max_connections=1)
    triton.hold = threading.Event()
    running = asyncio.create_task(engine.infer(InferenceRequest(texts=["a"])))
    await wait_for(triton, 1)
    waiting = asyncio.create_task(engine.infer(InferenceRequest(texts=["b", "cc"])))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await engine.infer(InferenceRequest(texts=["d"]))
    with pytest.raises(InvalidRequest, match="max_client_batch_size"):
        await engine.infer(InferenceRequest(texts=["d"] * 3))
    triton.hold.set()
    assert [values_of(each) for each in await asyncio.gather(running, waiting)] == [{"LENGTH": [1]}, {"LENGTH": [1, 2]}]


async def test_inference_that_ends_before_its_task_has_begun_gives_its_place_back(
    triton: TritonServer, start: Started
) -> None:
    engine = await start(triton)
    inference = asyncio.create_task(engine.infer(SUM, Caller("law")))
    for _ in range(10):
        await asyncio.sleep(0)
        if engine._live:
            break
    (live,) = engine._live
    live.task.cancel()  # in the same step of the event loop in which it was made
    with pytest.raises(asyncio.CancelledError):
        await inference
    await asyncio.sleep(0)
    assert engine.sender.places.total == 0
