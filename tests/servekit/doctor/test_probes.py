"""Claims about what the probes read: control groups, folders, ports, Hugging Face, the worker's Python."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from servekit.config import ServeConfig
from servekit.doctor import probes
from servekit.doctor.machine import Hub
from servekit.doctor.probes import cpu_quota, look_at_folder, memory_limit, missing_packages, model_on_hub

REPOSITORY = {
    "id": "owner/model",
    "siblings": [
        {"rfilename": "config.json", "size": 600},
        {"rfilename": "model-00001-of-00002.safetensors", "size": 700},
        {"rfilename": "model-00002-of-00002.safetensors", "size": 288},
        {"rfilename": "model-Q8_0.gguf", "size": 500},
        {"rfilename": "consolidated.safetensors", "size": 988},  # these two are not downloaded
        {"rfilename": "original/model.safetensors", "size": 988},
    ],
    "safetensors": {"parameters": {"BF16": 494}, "total": 494},
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("files", "groups", "quota"),
    [
        ({"cpu.max": "150000 100000"}, [":/"], 1.5),
        ({"cpu.max": "max 100000"}, [":/"], None),
        ({"slice/cpu.max": "200000 100000", "slice/unit/cpu.max": "max 100000"}, [":/slice/unit"], 2.0),  # of a parent
        ({"cpu.max": "400000 100000"}, [":/not/mounted/in/a/container"], 4.0),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "250000"}, ["cpu,cpuacct:/", "memory:/"], 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1"}, ["cpu:/"], None),
        ({}, [":/"], None),
        ({}, [], None),
    ],
)
def test_the_quota_of_control_groups(
    tmp_path: Path, files: dict[str, str], groups: list[str], quota: float | None
) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert cpu_quota(tmp_path, groups) == quota


@pytest.mark.parametrize(
    ("files", "groups", "limit"),
    [
        ({"memory.max": "8589934592"}, [":/"], 8589934592),
        ({"memory.max": "max"}, [":/"], None),
        ({"a/memory.max": "100", "a/b/memory.max": "200"}, [":/a/b"], 100),
        ({"memory/memory.limit_in_bytes": "300"}, ["memory:/"], 300),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, ["memory:/"], None),  # what version 1 has for none
    ],
)
def test_the_memory_of_control_groups(tmp_path: Path, files: dict[str, str], groups: list[str], limit: int) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert memory_limit(tmp_path, groups) == limit


def test_a_folder_that_does_not_exist_yet_is_as_its_nearest_parent(tmp_path: Path) -> None:
    found = look_at_folder(tmp_path / "a" / "b")
    assert found.problem is None and found.free_bytes > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_a_folder_that_cannot_be_written() -> None:
    assert look_at_folder(Path("/proc/self")).problem


def test_a_port_that_is_taken_is_named_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = probes._port(ServeConfig(port=listener.getsockname()[1]))
    assert found.problem is not None and "Address already in use" in found.problem
    assert found.holder is not None and f"process {os.getpid()} " in found.holder


def test_a_free_port_has_no_problem() -> None:
    assert probes._port(ServeConfig(port=0)).problem is None


def python_that(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(file))


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("kill -ILL $$", "the worker's Python was killed by SIGILL"),
        (
            "echo 'Traceback' >&2; echo 'ModuleNotFoundError: No module named torch' >&2; exit 1",
            "No module named torch",
        ),
        ("exit 3", "ended with code 3"),
        ("echo '{}'", "ended with code 0"),
        ("sleep 60", "took more than 0.3 s"),
    ],
)
def test_a_python_that_fails_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    monkeypatch.setattr(probes, "WORKER_TIMEOUT_S", 0.3 if script.startswith("sleep") else 60.0)
    python_that(monkeypatch, tmp_path, script)
    facts, found = probes._ask_worker(None)
    assert facts is None
    assert problem in found


class HubHandler(BaseHTTPRequestHandler):
    """Answers like Hugging Face, for one repository."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        is_known = self.path.startswith("/api/models/owner/model?")
        body = json.dumps(REPOSITORY if is_known else {"error": "Repository not found"}).encode()
        self.send_response(200 if is_known else 404)
        if not is_known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # the name is the library's
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
        yield address
        server.shutdown()


def test_a_model_that_is_not_downloaded_is_asked_for(hub: str) -> None:
    found = model_on_hub("owner/model")
    assert (found.problem, found.file_bytes, found.num_parameters, found.is_here) == (None, 988, 494, False)


def test_one_gguf_file_of_a_repository(hub: str) -> None:
    found = model_on_hub("owner/model/model-Q8_0.gguf")
    assert (found.problem, found.file_bytes, found.weight_format) == (None, 500, "GGUF")
    assert "has no 'other.gguf'" in (model_on_hub("owner/model/other.gguf").problem or "")


def test_a_model_that_does_not_exist_is_a_problem(hub: str) -> None:
    assert "Hugging Face refuses model 'owner/none'" in (model_on_hub("owner/none").problem or "")


def test_hugging_face_is_reached_or_not(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes._hub().problem is None
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert "Connection refused" in (probes._hub().problem or "")


def test_without_a_network_a_model_must_be_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    path, facts = probes._find(
        ServeConfig(model="owner/never-downloaded"), Hub(address="https://hub", problem="no route")
    )
    assert path is None and facts is not None
    assert "has not been downloaded, and Hugging Face is not reached" in (facts.problem or "")


def test_a_path_without_a_model_is_a_problem() -> None:
    _, facts = probes._find(ServeConfig(model="/no-such-model"), Hub(address="https://hub"))
    assert facts is not None and "no such directory" in (facts.problem or "")


def test_pickled_weights_are_a_problem_with_the_command_that_converts_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    _, facts = probes._find(ServeConfig(model=str(tmp_path)), Hub(address="https://hub"))
    assert facts is not None and "servekit convert" in (facts.problem or "")


def test_packages_of_an_extra_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ['msgspec>=0.20; extra == "terminal"', 'no-such-package[x]>=1.0; extra == "terminal"', "torch"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requirements)
    assert missing_packages("terminal") == ("no-such-package[x]>=1.0",)
    assert missing_packages("otel") == ()
