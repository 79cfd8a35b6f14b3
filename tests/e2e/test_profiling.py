"""Tests of the profiler, which one request starts and another one stops."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from servekit.engine.profiling import MAX_STEPS
from tests.support import proc
from tests.support.server_process import ServerProcess, serving

KEY = "of-an-operator"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiled") / "made" / "traces"  # the server creates it


@pytest.fixture(scope="module")
def profiled(traces: Path) -> Iterator[ServerProcess]:
    flags = ["--profile", str(traces), "--api-key", KEY, "--log-format", "json"]
    with serving(*flags, log=traces.parents[1] / "log") as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


def switch(server: ServerProcess, which: str) -> tuple[int, Any]:
    answer = server.client.post(f"/profile/{which}")
    return answer.status_code, answer.json()


def refusal(server: ServerProcess, which: str) -> str:
    status, body = switch(server, which)
    assert status == 409 and body["error"]["code"] == "profiler_refuses", body
    return str(body["error"]["message"])


def read(path: str) -> list[dict[str, Any]]:
    with gzip.open(path) as trace:
        events: list[dict[str, Any]] = json.load(trace)["traceEvents"]
    return events


def steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((event for event in events if event["name"].startswith("step ")), key=lambda event: event["ts"])


def test_a_profile_contains_the_steps_between_start_and_stop(profiled: ServerProcess, traces: Path) -> None:
    profiled.generate("Before the profile.", max_tokens=3)
    assert switch(profiled, "start") == (200, {"max_steps": MAX_STEPS})
    usage = profiled.generate("What color is the sky?", max_tokens=6, ignore_eos=True)["usage"]
    status, answer = switch(profiled, "stop")
    assert status == 200 and answer["num_steps"] in (6, 7), "a step may be in flight when the answer ends"
    assert Path(answer["path"]).parent == traces and list(traces.iterdir()) == [Path(answer["path"])]
    profiled.generate("After the profile.", max_tokens=3)
    events = read(answer["path"])
    names = [event["name"] for event in steps(events)]
    assert len(names) == answer["num_steps"]
    pattern = r"step \d+: (\d+) prefill \+ (\d+) decode tokens"
    computed = [tuple(map(int, found.groups())) for name in names if (found := re.fullmatch(pattern, name))]
    num_computed = usage["prompt_tokens"] - usage["cached_tokens"]
    assert computed == [(num_computed, 0), *[(0, 1)] * (len(names) - 1)]
    first, *_, last = steps(events)
    within = [event for event in events if event["name"] == "the model, one call into C"]
    assert len(within) == len(names), "it is not seen what a step does"
    within += [event for event in events if event.get("cat") == "cpu_op"]
    assert all(first["ts"] <= event["ts"] <= last["ts"] + last["dur"] for event in within)


def test_start_and_stop_out_of_order_are_refused_and_change_nothing(profiled: ServerProcess) -> None:
    assert "start one with POST /profile/start" in refusal(profiled, "stop")
    assert switch(profiled, "start")[0] == 200
    assert "recorded already" in refusal(profiled, "start")
    profiled.generate("a", max_tokens=2, ignore_eos=True)
    status, answer = switch(profiled, "stop")
    assert status == 200 and answer["num_steps"] >= 2
    assert "start one with POST /profile/start" in refusal(profiled, "stop")


def test_a_profiler_that_is_not_stopped_records_a_bounded_number_of_steps(profiled: ServerProcess) -> None:
    switch(profiled, "start")
    profiled.generate("Once upon a time", max_tokens=MAX_STEPS + 50, ignore_eos=True)
    status, answer = switch(profiled, "stop")
    assert status == 200 and answer["num_steps"] == MAX_STEPS
    assert len(steps(read(answer["path"]))) == MAX_STEPS


def test_profiling_does_not_change_answers(profiled: ServerProcess) -> None:
    fields = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.0}
    prompts = [f"Count from {number}." for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        undisturbed = list(threads.map(lambda prompt: profiled.generate(prompt, **fields)["generated_text"], prompts))
        others = [threads.submit(profiled.generate, prompt, **fields) for prompt in prompts]
        for _ in range(3):
            assert switch(profiled, "start")[0] == switch(profiled, "stop")[0] == 200
        assert [other.result()["generated_text"] for other in others] == undisturbed
    assert profiled.metric("servekit_worker_restarts_total") == 0
    assert len({line["level"] for line in map(json.loads, profiled.log.read_text().splitlines())}) <= 2


def test_a_recording_is_lost_with_its_worker(profiled: ServerProcess) -> None:
    assert switch(profiled, "start")[0] == 200
    os.kill(profiled.worker_pids()[0], signal.SIGKILL)
    profiled.wait_for_metric("servekit_worker_restarts_total", 1)
    status, body = switch(profiled, "stop")
    assert (status, body["error"]["code"]) == (503, "worker_unavailable")
    profiled.wait_until_ready()
    assert "what it had recorded is lost" in refusal(profiled, "stop")
    assert switch(profiled, "start")[0] == switch(profiled, "stop")[0] == 200


def test_profiling_requires_the_api_key(profiled: ServerProcess) -> None:
    for which in ("start", "stop"):
        assert profiled.client.post(f"/profile/{which}", headers={"authorization": "Bearer x"}).status_code == 401
        assert profiled.client.get(f"/profile/{which}").status_code == 405


def test_profiling_is_refused_without_the_flag(server: ServerProcess) -> None:
    for which in ("start", "stop"):
        assert "start the server with --profile DIR" in refusal(server, which)


def test_profiling_a_simulated_model_is_refused(tmp_path: Path) -> None:
    with serving("--model", "sim:instant", "--profile", str(tmp_path), log=tmp_path / "log") as simulated:
        assert "simulated" in refusal(simulated, "start")
        maps = proc.read(simulated.worker_pids()[0], "maps")
        assert "python" in maps and "torch" not in maps


def test_an_unusable_profile_directory_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "servekit", "serve", "--port", "0", "--profile", str(tmp_path / "file")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "File exists; choose another --profile" in ended.stderr
