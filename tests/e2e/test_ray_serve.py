"""Servers behind Ray Serve's proxy. Needs the package ray, which CI does not install."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tests.support.ray_nodes import RayNodes

pytest.importorskip("ray")
from tests.support.ray_serve import ServeApp

pytestmark = pytest.mark.long

ENOUGH_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(3, num_cpus=2)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def app(nodes: RayNodes) -> Iterator[ServeApp]:
    app = ServeApp(nodes, "three", model="sim:step=20ms", min_replicas=3, max_replicas=3)
    yield app
    app.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_openai_client_gets_a_stream_token_by_token(app: ServeApp) -> None:
    client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="unused")
    times_s, pieces = [], []
    stream = client.completions.create(model="three", prompt="Hello", max_tokens=30, stream=True)
    for chunk in stream:
        times_s.append(time.monotonic())
        pieces.append(chunk.choices[0].text)
    whole = client.completions.create(model="three", prompt="Hello", max_tokens=30)
    assert "".join(pieces) == whole.choices[0].text
    assert times_s[-1] - times_s[0] > 0.3, "the first piece did not wait for the last one"


def test_what_a_server_refuses_is_refused_in_its_words(app: ServeApp) -> None:
    response = app.client.post("/generate", json={"prompt": "Hello", "max_tokens": -1})
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_value"
    assert len(response.headers.get_list("x-request-id")) == 1
    assert app.client.get("/v1/models?x=a%20b").json()["data"][0]["id"] == "three"


def test_a_conversation_stays_where_its_prefix_is_cached(app: ServeApp) -> None:
    for conversation in range(6):
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{conversation} {turn} " * 100})
            body = {"model": "three", "messages": messages, "max_tokens": 8}
            answer = app.client.post("/v1/chat/completions", json=body).json()
            cached, prompt = answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]
            assert turn == 0 or cached > 0.4 * prompt
            messages.append(answer["choices"][0]["message"])


def test_a_client_that_goes_ends_its_request_at_the_server(app: ServeApp) -> None:
    body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
    with app.client.stream("POST", "/generate_stream", json=body) as response:
        lines = response.iter_lines()  # if nothing refers to it, the connection is closed
        assert next(lines).startswith("data: ")
        assert sum(app.metric("three", "servekit_num_requests_running")) == 1.0

    wait_until(lambda: app.metric("three", "servekit_num_requests_running") == [0.0, 0.0, 0.0])


def test_a_killed_server_is_replaced_and_the_others_answer_meanwhile(app: ServeApp) -> None:
    before = app.servers("three")
    os.kill(before[0], signal.SIGKILL)
    client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="unused")  # repeats what is refused, as it does by default
    for _ in range(20):
        assert client.completions.create(model="three", prompt="Hello", max_tokens=5).choices[0].text
    wait_until(lambda: len(app.servers("three")) == len(before) and before[0] not in app.servers("three"))


def test_an_upgrade_loses_no_stream_and_ends_the_servers_of_the_old_version(nodes: RayNodes, app: ServeApp) -> None:
    body = {"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True}

    def stream(_: int) -> str:
        with httpx2.stream("POST", f"{app.url}/generate_stream", json=body, timeout=120) as response:
            assert response.status_code == 200
            last = [line for line in response.iter_lines() if line.startswith("data: ")][-1]
            return str(json.loads(last.removeprefix("data: "))["generated_text"])

    with ThreadPoolExecutor(6) as threads:
        streams = [threads.submit(stream, number) for number in range(6)]
        time.sleep(2.0)
        app.deploy("upgraded", model="sim:step=20ms", min_replicas=2, max_replicas=2)
        texts = [stream.result() for stream in streams]
    assert len(set(texts)) == 1 and len(texts[0]) == 1000, "a token of the simulated model is a byte"
    wait_until(lambda: not app.servers("three") and len(app.servers("upgraded")) == 2)
    assert app.client.get("/v1/models").json()["data"][0]["id"] == "upgraded"


def test_servers_are_added_while_requests_wait_and_removed_when_none_do(nodes: RayNodes, app: ServeApp) -> None:
    app.deploy(
        "scaled",
        model="sim:step=20ms",
        max_num_seqs=2,
        min_replicas=1,
        max_replicas=3,
        scale_target_wait=1.0,
        scale_up_delay=1.0,
        scale_down_delay=5.0,
        look_back_period=4.0,
    )
    has_ended = threading.Event()
    statuses: list[int] = []

    def ask(_: int) -> None:
        with httpx2.Client(timeout=120) as client:
            while not has_ended.is_set():
                body = {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True}
                statuses.append(client.post(f"{app.url}/generate", json=body).status_code)

    wait_until(lambda: len(app.servers("scaled")) == 1)  # at first there are as many as of the version before
    with ThreadPoolExecutor(24) as threads:
        asking = [threads.submit(ask, number) for number in range(24)]
        try:
            wait_until(lambda: len(app.servers("scaled")) == 3)
            time.sleep(3.0)
        finally:
            has_ended.set()
        for each in asking:
            each.result()
    assert set(statuses) == {200}
    wait_until(lambda: len(app.servers("scaled")) == 1)
    assert app.client.get("/ready").status_code == 200
