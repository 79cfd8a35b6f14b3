"""Tests of chat templates: which one is used, and that a failing one affects only its own request."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx2
import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support import proc
from tests.support.server_process import ServerProcess, serving
from tests.support.timing import again_if_late, assert_on_time, assert_within

Json = dict[str, Any]
QUESTION = "What color is the sky?"
OWN = "<bos><|user|>{{ messages[0].content }}<eos><|assistant|>"  # as the demo model has it
RUNAWAY = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SANDBOX_TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo model without its template, in a server that accepts templates in requests."""
    directory = tmp_path_factory.mktemp("bare")
    model = copytree(DEMO_MODEL_PATH, directory / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    arguments = ["--model", str(model), "--trust-request-chat-template", "--sandbox-timeout", str(SANDBOX_TIMEOUT_S)]
    with serving(*arguments, log=directory / "log") as server:
        yield server


def chat(server: ServerProcess, **fields: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12, **fields}
    return server.client.post("/v1/chat/completions", json=body)


def answer_of(response: httpx2.Response) -> tuple[str, int]:
    """The answer, and the number of tokens of the rendered conversation."""
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def expected(server: ServerProcess, prompt: str = f"<bos><|user|>{QUESTION}<eos><|assistant|>") -> tuple[str, int]:
    answer = server.generate(prompt, temperature=0, max_tokens=12)
    return answer["generated_text"], answer["usage"]["prompt_tokens"]


def test_a_chat_without_any_template_is_refused_with_the_remedy(bare: ServerProcess) -> None:
    response = chat(bare)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "chat_template_missing", "messages")
    assert "--chat-template" in error["message"]


def test_a_request_may_bring_its_own_template_and_variables_for_it(bare: ServerProcess) -> None:
    assert answer_of(chat(bare, chat_template=OWN)) == expected(bare)
    template = OWN.replace("<bos><|user|>", "{{ prefix }}")
    assert answer_of(chat(bare, chat_template=template, chat_template_kwargs={"prefix": "<bos><|user|>"})) == expected(
        bare
    )


def test_a_model_without_a_form_for_calls_refuses_tools_with_the_remedies(bare: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "get_weather"}}
    response = chat(bare, chat_template=OWN, tools=[tool])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "no form for tool calls" in error["message"] and "tool_choice 'required'" in error["message"]
    assert "--tool-call-parser" in error["message"]


def test_a_requests_template_can_use_the_models_special_tokens(bare: ServerProcess) -> None:
    template = OWN.replace("<bos>", "{{ bos_token }}").replace("<eos>", "{{ eos_token }}")
    assert answer_of(chat(bare, chat_template=template)) == expected(bare)


def test_the_error_of_a_template_is_in_the_response(bare: ServerProcess) -> None:
    response = chat(bare, chat_template="{{ raise_exception('only two may speak') }}")
    assert response.status_code == 400 and "only two may speak" in response.json()["error"]["message"]


@again_if_late
def test_a_runaway_template_delays_no_other_stream_and_not_the_next_chat(bare: ServerProcess) -> None:
    token_times: list[float] = []
    is_enough = threading.Event()

    def read_streams() -> None:
        body = {"prompt": "Tell me a story.", "max_tokens": 1500, "ignore_eos": True}
        with httpx2.Client(base_url=bare.url, timeout=60) as client:
            while not is_enough.is_set():
                with client.stream("POST", "/generate_stream", json=body) as response:
                    for line in response.iter_lines():
                        token_times.extend([time.monotonic()] * line.startswith("data: "))
                        if is_enough.is_set():
                            break

    reading = threading.Thread(target=read_streams)
    reading.start()
    try:
        while not token_times:
            time.sleep(0.01)
        started = time.monotonic()
        refusal = chat(bare, chat_template=f"{RUNAWAY}{started}")  # the server remembers refusals
        refused = time.monotonic()
        served = answer_of(chat(bare, chat_template=OWN))
        time.sleep(0.1)
    finally:
        is_enough.set()
        reading.join()
    assert_on_time("too busy" not in refusal.text, "it had a thirtieth of a core")
    assert refusal.status_code == 400 and "not done within 1 s" in refusal.json()["error"]["message"]
    assert refused - started >= SANDBOX_TIMEOUT_S, "seconds of processor time"
    assert served == expected(bare)
    assert token_times[0] <= started and token_times[-1] >= refused, "the stream went on all the while"
    assert_within(1.0, max(later - earlier for earlier, later in pairwise(token_times)), "rendering it takes a second")


def test_killed_sandbox_processes_are_replaced(bare: ServerProcess) -> None:
    killed = bare.sandbox_pids()
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while {*killed} & {*proc.all_pids()}:
        assert time.monotonic() < deadline, "the server does not notice"
        time.sleep(0.01)
    assert answer_of(chat(bare, chat_template=OWN)) == expected(bare)
    grammar = {"type": "regex", "value": f"[ab]{{3}}{killed[0]}"}  # a grammar that is not cached
    answer = bare.generate(QUESTION, grammar=grammar, max_tokens=40)["generated_text"]
    assert answer[3:] == str(killed[0]) and set(answer[:3]) <= {"a", "b"}
    assert bare.sandbox_pids() and not {*bare.sandbox_pids()} & {*killed}


@pytest.mark.long
def test_the_operators_template_overrides_the_models_and_request_templates_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}<|user|>Say it again: {{ messages[0].content }}{{ eos_token }}<|assistant|>")
    with serving("--chat-template", str(file), log=tmp_path / "log") as server:
        by_operator = expected(server, f"<bos><|user|>Say it again: {QUESTION}<eos><|assistant|>")
        assert answer_of(chat(server)) == by_operator != expected(server)
        assert answer_of(chat(server, chat_template_kwargs={"bos_token": "not the client's to say"})) == by_operator
        response = chat(server, chat_template=OWN)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
