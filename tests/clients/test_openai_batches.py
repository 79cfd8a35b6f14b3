"""Files and batches with OpenAI's own client, and `servekit batch` beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import Batch

from servekit.cli import main
from tests.e2e.test_simulated_model import answer_to
from tests.support.server_process import ServerProcess, serving

KEYS = """
[[key]]
key = "key-of-a"
tenant = "a"
[[key]]
key = "key-of-b"
tenant = "b"
"""
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("batches")
    (folder / "keys.toml").write_text(KEYS)
    settings = ("--model", "sim:instant", "--batch-dir", str(folder / "batches"))
    # /ready needs no key.
    with serving(*settings, "--api-keys-file", str(folder / "keys.toml"), log=folder / "log") as server:
        yield server


def client_of(server: ServerProcess, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(own_server: ServerProcess) -> Iterator[OpenAI]:
    with client_of(own_server, "key-of-a") as client:
        yield client


def requests(num: int, url: str = "/v1/completions", **body: Any) -> bytes:
    lines = [
        {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": {"prompt": f"Number {number}", **body}}
        for number in range(num)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def created(client: OpenAI, content: bytes, endpoint: Any = "/v1/completions", **fields: Any) -> Batch:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: OpenAI, batch: Batch) -> Batch:
    deadline_s = time.monotonic() + TIMEOUT_S
    while batch.status not in ("completed", "failed", "cancelled", "expired"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def output(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_of_completions_goes_round(client: OpenAI) -> None:
    batch = ended(client, created(client, requests(30, max_tokens=5), metadata={"night": "1"}))
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    assert batch.status == "completed" and batch.error_file_id is None and batch.metadata == {"night": "1"}
    lines = output(client, batch.output_file_id)
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert answers == {f"request-{number}": answer_to(f"Number {number}", 5) for number in range(30)}
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    assert batch.id in [each.id for each in client.batches.list(limit=100)]


def test_a_batch_of_chats_has_wrong_requests_in_its_error_file(client: OpenAI) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": "right", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "wrong", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "max_tokens": -1}},
        {"custom_id": "many", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "n": 9}},
        {"custom_id": "model", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "model": "gpt-9"}},
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    batch = ended(client, created(client, content, "/v1/chat/completions"))
    (right,) = output(client, batch.output_file_id)
    assert right["response"]["body"]["choices"][0]["message"]["content"] == answer_to("user: hi\nassistant: ", 4)
    failed = {line["custom_id"]: line["response"] for line in output(client, batch.error_file_id)}
    assert {name: response["status_code"] for name, response in failed.items()} == {
        "wrong": 400,
        "many": 400,
        "model": 404,
    }
    assert failed["model"]["body"]["error"]["code"] == "model_not_found"


def test_a_wrong_file_fails_and_names_its_line(client: OpenAI) -> None:
    batch = ended(client, created(client, requests(2) + b"{}\n"))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == [3]


def test_a_batch_can_be_cancelled_and_its_file_deleted_afterwards(client: OpenAI) -> None:
    batch = created(client, requests(5000, max_tokens=200))
    with pytest.raises(BadRequestError) as refusal:
        client.files.delete(batch.input_file_id)
    assert refusal.value.code == "file_in_use"
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    counts = batch.request_counts
    assert batch.status == "cancelled" and counts is not None and counts.completed < 5000
    assert client.files.delete(batch.input_file_id).deleted
    assert counts.total in (0, counts.completed + counts.failed), "0 if its file was not checked yet"


def test_another_tenant_does_not_see_it(client: OpenAI, own_server: ServerProcess) -> None:
    batch = ended(client, created(client, requests(1)))
    with client_of(own_server, "key-of-b") as other:
        assert batch.id not in [each.id for each in other.batches.list()]
        for call in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.content(str(batch.output_file_id)),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(NotFoundError):
                call()


def test_a_file_is_answered_by_the_command_each_line_once(own_server: ServerProcess, tmp_path: Path) -> None:
    file, answers = tmp_path / "requests.jsonl", tmp_path / "requests.answers.jsonl"
    file.write_bytes(requests(40, max_tokens=5))
    command = ["batch", str(file), "--url", own_server.url, "--api-key", "key-of-a"]
    assert main(command) == 0
    whole = answers.read_bytes().splitlines(keepends=True)
    # As if it had been killed in the middle of writing the 21st answer.
    answers.write_bytes(b"".join(whole[:20]) + whole[20][:50])
    assert main(command) == 0
    lines = [json.loads(line) for line in answers.read_bytes().splitlines()]
    assert answers.read_bytes().startswith(b"".join(whole[:20])), "what was answered is not sent again"
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(lines) == 40
    assert found == {f"request-{number}": answer_to(f"Number {number}", 5) for number in range(40)}
    assert main(command) == 0 and len(answers.read_bytes().splitlines()) == 40


def test_the_command_says_what_it_cannot_do(
    own_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(requests(1, max_tokens=-1))
    assert main(["batch", str(file), "--url", own_server.url, "--api-key", "key-of-a"]) == 1
    assert "1 of all answered with an error" in capsys.readouterr().err
    other = ["--output", str(tmp_path / "other")]
    assert main(["batch", str(file), "--url", own_server.url, "--api-key", "wrong", *other]) == 1
    assert "API key" in capsys.readouterr().err
    for content, reason in (
        (requests(1) * 2, "used by an earlier line"),
        (b"{\n", "line 1"),
        (b'{"a": 1}\n', "line 1"),
    ):
        file.write_bytes(content)
        assert main(["batch", str(file), "--url", own_server.url, *other]) == 2
        assert reason in capsys.readouterr().err
    assert main(["batch", str(tmp_path / "missing")]) == 2
    assert main(["batch", str(file), "--output", str(file)]) == 2
    file.write_bytes(requests(1))
    (tmp_path / "other").write_text('{"something": "else"}\n')
    assert main(["batch", str(file), "--url", own_server.url, *other]) == 2
    assert "no answers" in capsys.readouterr().err


@pytest.mark.long  # it starts a server of its own
def test_the_command_can_start_the_server_itself(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(requests(10, max_tokens=3))
    assert main(["batch", str(file), "--model", "sim:instant", "--output", str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out").read_bytes().splitlines()) == 10
