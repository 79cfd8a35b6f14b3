"""A server with several models, some of them loaded on demand, as its clients see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from servekit.cli import main
from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support.server_process import ServerProcess, serving

# The demo model stays loaded. There is memory for two of the three simulated ones.
MODELS = """
default = "chat"
[memory]
cpu = 201
[[model]]
id = "chat"
aliases = ["gpt-4o"]
model = "demo"
num_kv_blocks = 100
memory_bytes = 1
[[model]]
id = "a"
model = "sim:step=5ms"
device = "cpu"
num_kv_blocks = 100
memory_bytes = 100
keep = "on_demand"
[[model]]
id = "b"
model = "sim:step=5ms,load=500ms"
device = "cpu"
num_kv_blocks = 100
memory_bytes = 100
keep = "on_demand"
[[model]]
id = "c"
model = "sim:step=5ms"
device = "cpu"
num_kv_blocks = 100
memory_bytes = 100
keep = "on_demand"
[[model]]
id = "broken"
model = "/no/such/directory"
memory_bytes = 0
keep = "on_demand"
[[alias]]
name = "canary"
models = { a = 50, b = 50 }
sticky = "conversation"
[[alias]]
name = "tried"
models = { chat = 1 }
mirror = "a"
"""
PROMPT = "Who was the first to reach the South Pole, é?"
MESSAGES = [{"role": "user", "content": "What color is the sky?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("several")
    (folder / "models.toml").write_text(MODELS)
    with serving("--models", str(folder / "models.toml"), log=folder / "log") as started:
        yield started


def answer_to(prompt: str, num_tokens: int) -> str:
    return bytes(NaiveReference().output(prompt.encode(), SamplingParams(max_tokens=num_tokens))).decode()


def complete(server: ServerProcess, model: str, num_tokens: int = 8) -> httpx2.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}
    return server.client.post("/v1/completions", json=body)


def states(server: ServerProcess) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.client.get("/v1/models").json()["data"]}


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sample(server: ServerProcess, line: str) -> float:
    """Return the value of one sample of the metrics."""
    found = [each for each in server.client.get("/metrics").text.splitlines() if each.startswith(line)]
    assert len(found) == 1, found
    return float(found[0].rpartition(" ")[2])


def test_third_model_makes_the_one_used_least_recently_make_room(server: ServerProcess) -> None:
    expected = answer_to(PROMPT, 8)
    for model in "abc":
        response = complete(server, model)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == expected and response.json()["model"] == model
        assert response.headers["x-model-position"] == "1" and int(response.headers["x-model-wait-ms"]) > 0
    found = states(server)
    assert (found["a"], found["b"], found["c"], found["chat"]) == ("cold", "ready", "ready", "ready")
    hot = complete(server, "c")
    assert "x-model-position" not in hot.headers
    assert len(server.worker_pids()) == 3
    assert [sample(server, f'servekit_model_loads_total{{model_name="{each}",result="loaded"}}') for each in "abc"] == [
        1.0,
        1.0,
        1.0,
    ]
    assert sample(server, 'servekit_model_wait_seconds_count{model_name="b",start="cold"}') == 1.0


def test_model_field_of_every_api_chooses_and_without_it_the_default_answers(server: ServerProcess) -> None:
    post = server.client.post
    chat = {"messages": MESSAGES, "max_tokens": 4}

    def model_of(path: str, body: dict[str, Any]) -> str:
        response = post(path, json=body)
        assert response.status_code == 200, response.text
        name: str = response.json()["model"]
        return name

    for name, model in (("c", "c"), ("gpt-4o", "chat"), ("chat", "chat"), ("", "chat"), (None, "chat")):
        assert model_of("/v1/chat/completions", chat | {"model": name}) == model
    assert model_of("/v1/messages", chat | {"model": "c"}) == "c"
    assert model_of("/v1/responses", {"input": "x", "max_output_tokens": 4, "model": "c"}) == "c"
    assert model_of("/api/chat", {"model": "c:latest", "messages": MESSAGES, "stream": False}) == "c"
    for body in ({"prompt": PROMPT, "max_tokens": 8}, {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}):
        answers = {name: post("/generate", json=body | {"model": name}).json() for name in ("c", "chat")}
        texts = {name: each.get("text", each.get("generated_text")) for name, each in answers.items()}
        assert texts["c"] == answer_to(PROMPT, 8) != texts["chat"]
    assert post("/tokenize", json={"prompt": "abc", "model": "c"}).json()["count"] == 3
    assert {each["name"] for each in server.client.get("/api/tags").json()["models"]} >= {"chat", "a", "b", "c"}
    assert "chat" in {each["name"] for each in server.client.get("/api/ps").json()["models"]}
    info = server.client.get("/info", params={"model": "c"}).json()
    assert info["model_name"] == "c" and info["worker"]["device"] == "simulated"
    assert [each["id"] for each in info["models"]] == ["chat", "a", "b", "c", "broken"]
    assert server.client.get("/ui/state", params={"model": "c"}).json()["model_name"] == "c"
    assert server.client.get("/ui/state").json()["model_name"] == "chat"


def test_unknown_model_gets_404_with_those_there_are(server: ServerProcess) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/api/generate", {"prompt": "x"})):
        response = server.client.post(path, json=body | {"model": "gpt-5"})
        assert response.status_code == 404
        assert "'gpt-5' does not exist" in response.text and "'chat', 'a', 'b', 'c'" in response.text
    assert server.client.get("/v1/models/gpt-5").status_code == 404
    assert server.client.get("/v1/models/gpt-4o").json()["id"] == "chat"


def test_conversation_stays_at_one_model_of_an_alias(server: ServerProcess) -> None:
    def ask(text: str, *more: str) -> str:
        messages = [{"role": "user", "content": each} for each in (text, *more)]
        body = {"model": "canary", "messages": messages, "max_tokens": 1}
        model: str = server.client.post("/v1/chat/completions", json=body).json()["model"]
        return model

    first = [ask(f"question {number}") for number in range(12)]
    assert set(first) == {"a", "b"}
    assert [ask(f"question {number}", "and then?") for number in range(12)] == first


def test_copies_of_requests_go_to_a_loaded_model_and_nobody_gets_their_answers(server: ServerProcess) -> None:
    def copies(result: str) -> float:
        return sample(server, f'servekit_mirrored_requests_total{{model_name="a",result="{result}"}}')

    def ask(**fields: Any) -> httpx2.Response:
        response = server.client.post("/v1/chat/completions", json={"model": "tried", "messages": MESSAGES, **fields})
        assert response.status_code == 200, response.text
        return response

    assert complete(server, "a").status_code == 200
    generated = sample(server, 'servekit_generation_tokens_total{model_name="a"}')
    assert ask(max_tokens=5).json()["model"] == "chat"
    assert b'"model":"chat"' in ask(max_tokens=7, stream=True).content
    tagged = {"model": "tried:latest", "messages": MESSAGES, "stream": False, "options": {"num_predict": 4}}
    assert server.client.post("/api/chat", json=tagged).status_code == 200
    until(lambda: copies("answered") == 3.0)
    assert sample(server, 'servekit_generation_tokens_total{model_name="a"}') == generated + 16
    assert copies("dropped") == copies("failed") == 0.0
    assert server.client.get("/v1/aliases").json()["mirrors"] == {"tried": {"a": 100.0}}
    server.client.post("/v1/models/a/unload")
    until(lambda: states(server)["a"] == "cold")
    ask(max_tokens=2)
    until(lambda: copies("dropped") == 1.0)
    assert states(server)["a"] == "cold", "a copy loads no model"
    assert server.client.post("/v1/aliases/tried", json={"models": {"chat": 1}}).json().get("mirrors") is None
    ask(max_tokens=2)
    assert copies("dropped") == 1.0
    server.process.send_signal(signal.SIGHUP)  # undoes it
    until(lambda: "mirrors" in server.client.get("/v1/aliases").json())


def test_model_that_cannot_be_loaded_fails_only_the_requests_that_name_it(server: ServerProcess) -> None:
    first, second = complete(server, "broken"), complete(server, "broken")
    for response in (first, second):
        assert response.status_code == 503 and "'broken' cannot be used at present" in response.text
        assert "/no/such/directory" in response.text and int(response.headers["retry-after"]) >= 1
    assert sample(server, 'servekit_model_loads_total{model_name="broken",result="failed"}') == 1.0
    assert states(server)["broken"] == "failed"
    assert complete(server, "chat").status_code == 200 and server.client.get("/ready").status_code == 200


def test_first_requests_at_the_same_time_load_a_model_once(server: ServerProcess) -> None:
    for other in "ac":
        complete(server, other)
    assert states(server)["b"] == "cold"
    before = sample(server, 'servekit_model_loads_total{model_name="b",result="loaded"}')
    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda _: complete(server, "b"), range(12)))
    assert [each.status_code for each in responses] == [200] * 12
    assert {each.json()["choices"][0]["text"] for each in responses} == {answer_to(PROMPT, 8)}
    assert sample(server, 'servekit_model_loads_total{model_name="b",result="loaded"}') == before + 1.0
    assert sample(server, 'servekit_model_uses{model_name="b"}') == 0.0


def test_lost_worker_of_one_model_leaves_the_others_undisturbed(server: ServerProcess) -> None:
    for model in "cb":
        assert complete(server, model).status_code == 200
    before = set(server.worker_pids())
    assert complete(server, "a").status_code == 200
    (worker,) = set(server.worker_pids()) - before
    texts: dict[str, str] = {}
    threads = [
        threading.Thread(
            target=lambda name=name: texts.update({name: complete(server, name, 300).json()["choices"][0]["text"]})
        )
        for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for name in "ab":
        until(
            lambda name=name: sample(server, f'servekit_num_requests_running{{model_name="{name}",replica="0"}}') == 1
        )
    os.kill(worker, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert texts == {"a": answer_to(PROMPT, 300), "b": answer_to(PROMPT, 300)}
    assert sample(server, 'servekit_worker_restarts_total{cause="ended",model_name="a",replica="0"}') >= 1.0
    assert sample(server, 'servekit_worker_restarts_total{cause="ended",model_name="b",replica="0"}') == 0.0


def test_model_that_is_used_stays_and_a_client_that_leaves_the_line_is_forgotten(server: ServerProcess) -> None:
    for model in "ab":
        assert complete(server, model).status_code == 200
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True}
    with (
        server.client.stream("POST", "/generate_stream", json=body | {"model": "a"}) as of_a,
        server.client.stream("POST", "/generate_stream", json=body | {"model": "b"}) as of_b,
    ):
        assert of_a.status_code == of_b.status_code == 200
        with pytest.raises(httpx2.ReadTimeout):
            server.client.post("/v1/completions", json={"model": "c", "prompt": "x"}, timeout=0.5)
        until(lambda: states(server)["c"] == "cold")
        assert states(server)["a"] == states(server)["b"] == "ready"
    assert complete(server, "c").status_code == 200


def test_operator_unloads_loads_and_divides_and_sighup_reads_the_file_again(server: ServerProcess) -> None:
    post = server.client.post
    assert complete(server, "a").status_code == 200
    assert post("/v1/models/a/unload").json() == {"id": "a", "state": "unloading"}
    until(lambda: states(server)["a"] == "cold")
    assert post("/v1/models/a/load").json() == {"id": "a", "state": "ready"}
    assert states(server)["a"] == "ready"
    refused = post("/v1/models/chat/unload")
    assert refused.status_code == 400 and "stays loaded" in refused.text
    assert post("/v1/aliases/canary", json={"models": {"b": 1}}).json()["aliases"]["canary"] == {"b": 1.0}
    assert [complete(server, "canary").json()["model"] for _ in range(3)] == ["b"] * 3
    path = server.log.with_name("models.toml")
    path.write_text(MODELS.replace("a = 50, b = 50", "a = 1"))
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.client.get("/v1/aliases").json()["aliases"]["canary"] == {"a": 1.0})
    assert [complete(server, "canary").json()["model"] for _ in range(3)] == ["a"] * 3
    path.write_text(MODELS + "[[model]]")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_log("the models were not changed")
    path.write_text(MODELS)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: len(server.client.get("/v1/aliases").json()["aliases"]["canary"]) == 2)


def test_model_that_leaves_the_file_ends_its_answers_and_then_its_worker(server: ServerProcess) -> None:
    path = server.log.with_name("models.toml")
    body = {"model": "b", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        received = [next(lines)]
        workers = set(server.worker_pids())
        path.write_text(MODELS.replace('id = "b"', 'id = "new"').replace("a = 50, b = 50", "a = 1"))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: complete(server, "b", 1).status_code == 404)
        assert "new" in states(server) and workers <= set(server.worker_pids()), "it still answers"
        received += lines
    events = [json.loads(line[6:]) for line in received if line.startswith("data: {")]
    assert "".join(each["choices"][0]["text"] for each in events) == answer_to(PROMPT, 300)
    until(lambda: not workers <= set(server.worker_pids()))
    path.write_text(MODELS)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: "b" in states(server))


def test_top_lists_all_models_and_shows_the_one_that_is_named(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "servekit", "top", server.url]
    for arguments, shown in (([], "chat"), (["--model", "c"], "c")):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, timeout=120)
        title, models = done.stdout.splitlines()[:2]
        assert shown in title.split() and "chat ready" in models and "broken" in models
    done = subprocess.run([*command, "--model", "none"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "'none' does not exist" in done.stderr


def test_two_models_of_a_server_are_compared_by_their_names(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "questions.jsonl").write_text('{"prompt": "What?", "answer": "no", "max_tokens": 4}\n')
    names = ["--served-model-name", "b", "--against-model-name", "a", "--questions", str(tmp_path / "questions.jsonl")]
    assert main(["eval", "--url", server.url, *names]) == 0
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if server.url in line]
    assert [(url.strip(), name.strip()) for url, name in rows] == [(server.url, "b"), (server.url, "a")]


def test_several_models_are_named_on_the_command_line(tmp_path: Path) -> None:
    with serving("one=sim:step=1ms", "sim:instant", "--num-kv-blocks", "50", log=tmp_path / "log") as server:
        assert states(server) == {"one": "ready", "sim:instant": "ready"}
        assert complete(server, "one").json()["model"] == "one"
        assert complete(server, "sim:instant").json()["model"] == "sim:instant"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
