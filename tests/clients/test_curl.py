"""curl, whose `-d` labels the body as a form, and which shows events as lines of text."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.support.server_process import ServerProcess
from tests.support.timing import again_if_late, assert_within

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")

SKY = "What color is the sky?"


def curl(server: ServerProcess, path: str, *arguments: str) -> str:
    command = [str(CURL), "--silent", "--show-error", "--no-buffer", "--max-time", "60", server.url + path, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def data(output: str) -> list[str]:
    """What stands in a stream's data lines; besides these there are comments, empty lines and, after GET, ids."""
    lines = output.splitlines()
    assert all(line == "" or line.startswith((":", "id: ", "data: ")) for line in lines)
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@again_if_late
@pytest.mark.parametrize(
    ("path", "body", "num_marks"),
    [
        ("/generate_stream", {"prompt": "Count to 20."}, 0),
        ("/generate_stream", {"inputs": "Count to 20."}, 0),
        ("/v1/completions", {"prompt": "Count to 20.", "stream": True}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Count to 20."}], "stream": True}, 1),
    ],
)
def test_tokens_arrive_one_by_one(server: ServerProcess, path: str, body: dict[str, Any], num_marks: int) -> None:
    if "inputs" in body:
        body = {**body, "parameters": {"max_new_tokens": 150, "ignore_eos": True}}
    else:
        body = {**body, "max_tokens": 150, "ignore_eos": True}
    command = [str(CURL), "--silent", "--no-buffer", "--max-time", "60", server.url + path, "-d", json.dumps(body)]
    times, lines = [], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("data: "):
                times.append(time.monotonic())
                lines.append(line.strip())
    assert process.returncode == 0
    assert [line for line in lines if line == "data: [DONE]"] == lines[-1:] * num_marks
    assert len(lines) >= 100, "not in a few big pieces"
    gaps = [after - before for before, after in pairwise(times)]
    assert_within((times[-1] - times[0]) / 2, max(gaps), "not all at the end")


def test_stream_headers(server: ServerProcess) -> None:
    output = curl(server, "/v1/completions", "-i", "-d", json.dumps({"prompt": SKY, "stream": True}))
    head = output.replace("\r\n", "\n").partition("\n\n")[0].lower()
    assert head.startswith("http/1.1 200")
    for line in ("content-type: text/event-stream", "cache-control: no-", "x-accel-buffering: no"):
        assert line in head


def test_text_generation_inference_in_three_places(server: ServerProcess) -> None:
    body = json.dumps({"inputs": SKY, "parameters": {"max_new_tokens": 20}})
    assert json.loads(curl(server, "/generate", "-d", body)) == {"generated_text": " The sky is blue."}
    assert json.loads(curl(server, "/", "-d", body)) == [{"generated_text": " The sky is blue."}]
    last = json.loads(data(curl(server, "/generate_stream", "-d", body))[-1])
    assert last["generated_text"] == " The sky is blue."
    streamed = {**json.loads(body), "stream": True}
    for path in ("/", "/generate"):
        events = [json.loads(event) for event in data(curl(server, path, "-d", json.dumps(streamed)))]
        assert "".join(event["token"]["text"] for event in events) == " The sky is blue."


def test_a_stream_from_the_address_bar(server: ServerProcess) -> None:
    """GET, as a browser's EventSource does."""
    arguments = ("--get", "--data-urlencode", f"prompt={SKY}", "-d", "max_tokens=4", "-d", "stop=zebra")
    events = [json.loads(event) for event in data(curl(server, "/generate_stream", *arguments))]
    assert "".join(event["token"]["text"] for event in events) == " The sky is blue"
    assert len(events) == 4 and events[-1]["finish_reason"] == "length"
    refusal = json.loads(curl(server, "/generate_stream?prompt=a&max_tokens=many"))
    assert refusal["error"]["param"] == "max_tokens"


def test_tokenize_and_detokenize_round_trip(server: ServerProcess) -> None:
    tokenized = json.loads(curl(server, "/tokenize", "-d", json.dumps({"prompt": SKY, "add_special_tokens": False})))
    assert tokenized["count"] == len(tokenized["tokens"]) == 6 and tokenized["max_model_len"] == 2048
    assert json.loads(curl(server, "/detokenize", "-d", json.dumps({"tokens": tokenized["tokens"]})))["prompt"] == SKY


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_errors_have_openais_and_tgis_fields(server: ServerProcess, path: str) -> None:
    body = json.dumps({"inputs": SKY, "parameters": {"max_new_tokens": 0}})
    output = curl(server, path, "-d", body, "-w", "\n%{http_code}")
    text, _, status = output.rpartition("\n")
    assert status == "400"
    assert json.loads(text)["error_type"] == "validation"
    assert json.loads(text)["error"]["param"] == "parameters.max_new_tokens"
