"""A model that vLLM serves in processes of this server. A program with vLLM's flags and API stands for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from servekit.api.app import create_app
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.errors import ConfigError, ServekitError, WorkerLost, WorkerNotReady
from servekit.models.model_file import parse_model_file
from servekit.models.several_models import SeveralModels
from servekit.remote.remote_engine import RemoteEngine
from servekit.remote.settings import VllmSettings
from servekit.remote.vllm_engine import VllmEngine, visible_devices
from tests.support.asgi import Answer, ask

FAKE = [sys.executable, str(Path(__file__).parents[2] / "support" / "fake_vllm.py")]
TEXT = "The sky is blue."


def file_with(told: Path, more: str = "") -> str:
    return f"""
    [memory]
    cpu = 100
    [[model]]
    id = "here"
    kind = "vllm"
    model = "there"
    device = "cpu"
    memory_bytes = 60
    max_model_len = 77
    keep = "on_demand"
    vllm = {{ command = {json.dumps(FAKE)}, arguments = ["--told", "{told}"], environment = {{ MORE = "x" }} }}
    {more}
    """


def manager_of(toml: str, clock: Any = time.monotonic) -> SeveralModels:
    config = ServeConfig(models="models.toml")
    return SeveralModels(config, parse_model_file(toml.encode(), "models.toml", config, "cpu"), clock)


async def complete(app: Starlette, prompt: str = "x", model: str = "here", **fields: Any) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": 9, **fields}
    return await ask(app, "POST", "/v1/completions", body=json.dumps(body).encode())


def text_of(answer: Answer) -> str:
    text: str = json.loads(answer.body)["choices"][0]["text"]
    return text


def about(told: Path) -> Any:
    """What the program told of itself when it was started last; None before."""
    return json.loads(told.read_text() or "null") if told.exists() else None


async def until_ended(pids: list[int]) -> None:
    async with asyncio.timeout(30):
        while any(_is_running(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[Path]:
    """The file to which the program writes its process ids. They have all ended when the test ends."""
    path = tmp_path / "told"
    yield path
    if (last := about(path)) is not None:
        await until_ended(last["pids"])


async def test_vllm_is_started_when_its_model_is_named_and_makes_room_for_others(told: Path) -> None:
    other = file_with(told).partition("[[model]]")[2].replace('"here"', '"other"').replace(f'"--told", "{told}"', "")
    manager = manager_of(file_with(told, "[[model]]" + other))
    await manager.start()
    app = create_app(manager)
    assert about(told) is None
    answer = await complete(app)
    assert text_of(answer) == TEXT and "x-model-wait-ms" in answer.headers
    first = about(told)
    assert first["more"] == "x" and first["cuda"] is None
    model = manager.find("here", Caller())
    assert model.max_prompt_tokens == 77, "the setting became a flag"
    assert text_of(await complete(app, model="other")) == TEXT
    await until_ended(first["pids"])
    assert model.state == "cold", "there is memory for one of the two"
    await manager.stop()


async def test_vllm_that_dies_within_an_answer_is_started_again(told: Path) -> None:
    now_s = 0.0
    manager = manager_of(file_with(told), lambda: now_s)
    await manager.start()
    app = create_app(manager)
    model = manager.find("here", Caller())
    answer = await complete(app, "crash")
    assert answer.status in (502, 503), answer.body
    async with asyncio.timeout(30):
        while model.state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await until_ended(about(told)["pids"])
    answer = await complete(app)
    assert answer.status == 503 and "exited with code 3" in answer.error["message"]
    now_s = 6.0
    assert text_of(await complete(app)) == TEXT
    answer = await complete(app, "crash", stream=True)
    assert b'"text":"The "' in answer.body and b'"error"' in answer.body
    await manager.stop()


@pytest.mark.parametrize(
    ("devices", "own", "of_vllm"),
    [
        (["cpu"], "2,3", None),
        (["cuda:1"], None, "1"),
        (["cuda:0", "cuda:1"], "2,3", "2,3"),
        (["cuda:1"], "7,GPU-5", "GPU-5"),
    ],
)
async def test_devices_of_vllm_are_places_in_the_servers_own_list(
    devices: list[str], own: str | None, of_vllm: str | None
) -> None:
    assert visible_devices(devices, own) == of_vllm


def engine_of(*arguments: str, devices: tuple[str, ...] = ("cpu",), command: list[str] = FAKE, **config: Any) -> Any:
    settings = VllmSettings(command=tuple(command), arguments=list(arguments))
    return VllmEngine(ServeConfig(model="there", served_model_name="here", **config), settings, devices)


async def test_all_processes_of_vllm_end_with_it(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = engine_of("--told", str(told), devices=("cuda:1", "cuda:0"))
    await engine.start()
    found = about(told)
    assert found["cuda"] == "1,0" and engine.state == "ready"
    os.kill(found["pids"][0], signal.SIGKILL)
    await engine.wait_until_failed()
    assert isinstance(engine.failure, WorkerLost) and "was killed by signal 9" in engine.failure.message
    await until_ended(found["pids"])
    await engine.stop(graceful=False)
    with pytest.raises(ServekitError):
        engine.check_admission(Caller(), 1, 1)
    assert not about(engine._process._folder), "its socket is removed"


async def test_all_processes_of_vllm_end_when_this_server_is_killed(told: Path) -> None:
    launcher = [sys.executable, "-m", "servekit.remote.vllm_launcher", *FAKE, "serve", "m", "--told", str(told)]
    process = await asyncio.create_subprocess_exec(*launcher, "--uds", f"{told}.socket", stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    async with asyncio.timeout(30):
        while about(told) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    process.stdin.close()  # as the kernel does
    await until_ended(about(told)["pids"])
    await process.wait()


async def test_vllm_that_cannot_start_is_explained() -> None:
    engine = engine_of("--fail")
    with pytest.raises(WorkerNotReady, match="vLLM exited with code 7 before it had loaded the model 'there'"):
        await engine.start()
    assert engine.stage == "vLLM loads the model"
    await engine.stop(graceful=False)
    engine = engine_of(command=["no-such-vllm"])
    with pytest.raises(WorkerNotReady, match="no program 'no-such-vllm' to start vLLM with"):
        await engine.start()
    await engine.stop(graceful=False)


async def test_load_timeout_ends_vllm(told: Path) -> None:
    engine = engine_of("--told", str(told), load_timeout=0.01)
    with pytest.raises(WorkerNotReady, match=r"within 0\.01 s"):
        await engine.start()
    await engine.stop(graceful=False)


def test_engine_that_cannot_be_made_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(*_: Any, **__: Any) -> None:
        raise ConfigError("httpx2 is missing")

    monkeypatch.setattr(RemoteEngine, "__init__", fail)
    with pytest.raises(ConfigError):
        VllmEngine(ServeConfig(model="m"), VllmSettings(), [])
    assert not list(tmp_path.iterdir())
