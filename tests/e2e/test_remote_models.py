"""A server with a local model and two on other servers: one of servekit's own, and one that is slow."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import pytest

from tests.support.scripted_server import ScriptedServer, event, scripted_server
from tests.support.server_process import ServerProcess, serving
from tests.support.timing import again_if_late, assert_on_time

MESSAGES = [{"role": "user", "content": "What color is the sky?"}]
OPTIONS = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def slow() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving("demo", "--api-key", "key-there", log=tmp_path_factory.mktemp("there") / "log") as started:
        yield started


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, there: ServerProcess, slow: ScriptedServer
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("remote")
    (folder / "models.toml").write_text(f"""
        [[model]]
        id = "local"
        model = "demo"
        device = "cpu"
        [[model]]
        id = "remote"
        kind = "openai"
        model = "demo"
        remote = {{ url = "{there.url}/v1", api_key_env = "KEY_THERE", dialect = "vllm" }}
        [[model]]
        id = "slow"
        kind = "openai"
        model = "slow"
        remote = {{ url = "{slow.url}/v1", max_connections = 50, failures_to_open = 1000 }}
    """)
    environment = {"KEY_THERE": "key-there"}
    with serving("--models", str(folder / "models.toml"), log=folder / "log", environment=environment) as started:
        yield started


def post(server: ServerProcess, path: str, **fields: object) -> httpx2.Response:
    response = server.client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response


def data_of(response: httpx2.Response) -> list[dict[str, object]]:
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def texts(server: ServerProcess, model: str) -> dict[str, object]:
    """The answer in each wire format, whole and streamed, and how many tokens it has."""
    chat = {"model": model, "messages": MESSAGES, **OPTIONS}
    text = {"model": model, "prompt": "The sky is", **OPTIONS}
    found: dict[str, object] = {}
    body = post(server, "/v1/chat/completions", **chat).json()
    found["openai"] = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
    found["openai, usage"] = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    chunks = data_of(post(server, "/v1/chat/completions", stream=True, **chat))
    found["openai, streamed"] = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks)  # type: ignore[index]
    body = post(server, "/v1/messages", **chat).json()
    found["anthropic"] = body["content"][0]["text"], body["usage"]["input_tokens"], body["usage"]["output_tokens"]
    chunks = data_of(post(server, "/v1/messages", stream=True, **chat))
    found["anthropic, streamed"] = "".join(
        each["delta"]["text"]  # type: ignore[index]
        for each in chunks
        if each["type"] == "content_block_delta"
    )
    ollama = {"model": model, "messages": MESSAGES, "options": {"temperature": 0, "num_predict": 24}}
    body = post(server, "/api/chat", stream=False, **ollama).json()
    found["ollama"] = body["message"]["content"], body["eval_count"], body["prompt_eval_count"], body["done_reason"]
    lines = post(server, "/api/chat", **ollama).text.splitlines()
    found["ollama, streamed"] = "".join(json.loads(line)["message"]["content"] for line in lines)
    body = post(server, "/v1/completions", **text).json()
    found["completions"] = body["choices"][0]["text"], body["usage"]["completion_tokens"]
    body = post(server, "/generate", **text).json()
    found["native"] = body["generated_text"], body["finish_reason"], body["usage"]["completion_tokens"]
    chunks = data_of(post(server, "/generate_stream", **text))
    found["native, streamed"] = chunks[-1]["generated_text"]
    tgi = {"model": model, "inputs": "The sky is", "parameters": {"max_new_tokens": 24, "do_sample": False}}
    found["tgi"] = post(server, "/generate", **tgi).json()["generated_text"]
    found["tgi, streamed"] = data_of(post(server, "/generate_stream", **tgi))[-1]["generated_text"]
    return found


def test_remote_model_answers_as_the_same_local_model_does_in_every_wire_format(server: ServerProcess) -> None:
    assert texts(server, "remote") == texts(server, "local")


def sample(server: ServerProcess, line: str) -> float:
    (found,) = [each for each in server.client.get("/metrics").text.splitlines() if each.startswith(line)]
    return float(found.rpartition(" ")[2])


def test_client_that_leaves_ends_the_computation_on_the_other_server(
    server: ServerProcess, there: ServerProcess
) -> None:
    aborted = 'servekit_request_success_total{finished_reason="abort"'
    there.client.headers["Authorization"] = "Bearer key-there"
    before = sample(there, aborted)
    body = {"model": "remote", "prompt": "The sky is", "max_tokens": 400, "ignore_eos": True}
    with server.client.stream("POST", "/generate_stream", json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 60
    while sample(there, aborted) == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def seconds_of_local_answers(server: ServerProcess, number: int) -> list[float]:
    found = []
    for _ in range(number):
        started_s = time.monotonic()
        post(server, "/v1/completions", model="local", prompt="The sky is", temperature=0, max_tokens=24)
        found.append(time.monotonic() - started_s)
    return found


@again_if_late
def test_slow_remote_model_does_not_slow_a_local_one(server: ServerProcess, slow: ScriptedServer) -> None:
    """50 requests hang at the slow server, and 30 more wait for a connection to it."""
    never = threading.Event()
    first = event({"choices": [{"index": 0, "text": "slow", "finish_reason": None}]})
    slow.scripts["/v1/completions"] = [[first, never]]
    seconds_of_local_answers(server, 3)
    alone = seconds_of_local_answers(server, 12)

    def ask() -> None:
        with suppress(httpx2.HTTPError), httpx2.Client(base_url=server.url, timeout=60) as client:
            client.post("/v1/completions", json={"model": "slow", "prompt": "x", "stream": False})

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(80)]
    for thread in threads:
        thread.start()
    labels = '{model_name="slow"}'
    deadline = time.monotonic() + 60
    while (
        sample(server, f"servekit_remote_num_connections{labels}"),
        sample(server, f"servekit_remote_num_waiting{labels}"),
    ) != (50, 30):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    beside = seconds_of_local_answers(server, 12)
    never.set()
    for thread in threads:
        thread.join(60)
    alone_s, beside_s = statistics.median(alone), statistics.median(beside)
    assert_on_time(beside_s < 1.5 * alone_s, f"{alone_s:.3f} s alone, {beside_s:.3f} s beside a slow remote model")
