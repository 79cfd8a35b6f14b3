"""The keys file is read again when that is asked for, and a bad one changes nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from starlette.applications import Starlette

from servekit.api.app import create_app, replace_keys
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.server import keys_file
from servekit.server.keys_file import KeysReload, read_keys

LIMIT_S = 60
KEYS = "[[key]]\nkey = 'one'\ntenant = 'a'\n"


@asynccontextmanager
async def reloading(path: Path) -> AsyncIterator[tuple[Starlette, KeysReload]]:
    _write(path, KEYS)
    config = ServeConfig(api_keys_file=str(path), api_key="setting")
    app = create_app(LLMEngine(config), read_keys(config))
    reload = KeysReload(partial(replace_keys, app), config)
    task = asyncio.create_task(reload.run())
    async with asyncio.timeout(LIMIT_S):
        yield app, reload
    task.cancel()


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def known(app: Starlette) -> list[str]:
    return [key for key in ("setting", "one", "two") if app.state.keyring.find(key.encode())]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_reload_replaces_the_keys_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    async with reloading(path) as (app, reload):
        path.write_text(KEYS.replace("one", "two"))
        assert known(app) == ["setting", "one"]
        reload.request()
        await until(lambda: known(app) == ["setting", "two"])
        too_long, too_deep = f"{KEYS}min_priority = {'9' * 5000}", f"{KEYS}x = {'[' * 50_000}{']' * 50_000}"
        for number, wrong in enumerate(("", KEYS[:-5], KEYS + KEYS, too_long, too_deep, None), 1):
            path.unlink() if wrong is None else path.write_text(wrong)
            reload.request()
            await until(lambda number=number: caplog.text.count("were not changed") == number)  # type: ignore[misc]
            assert known(app) == ["setting", "two"]
        path.write_text(KEYS)
        reload.request()
        await until(lambda: known(app) == ["setting", "one"])


async def test_pipe_in_place_of_the_file_is_refused_and_nothing_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    async with reloading(path) as (app, reload):
        path.unlink()
        os.mkfifo(path)  # opening it would wait for a writer
        reload.request()
        await until(lambda: "is not a regular file, and can be read at the start only" in caplog.text)
        path.unlink()
        path.write_text(KEYS.replace("one", "two"))
        reload.request()
        await until(lambda: known(app) == ["setting", "two"])


async def test_file_that_cannot_be_read_in_time_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)
    monkeypatch.setattr(keys_file, "RELOAD_TIMEOUT_S", 0.05)
    async with reloading(path) as (app, reload):
        monkeypatch.setattr(keys_file, "read_keys", lambda _: fifo.read_bytes())
        reload.request()
        await until(lambda: "could not be read within 0.05 s" in caplog.text)
        assert known(app) == ["setting", "one"]
        fifo.write_bytes(b"")  # lets the thread end


async def test_models_that_cannot_be_read_in_time_may_wait_for_the_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, goes_on = tmp_path / "models.toml", threading.Event()
    _write(path, "")
    monkeypatch.setattr(keys_file, "RELOAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(keys_file, "read_model_file", lambda _: goes_on.wait(LIMIT_S))
    reload = KeysReload(lambda _: None, ServeConfig(models=str(path)), lambda _: None)
    task = asyncio.create_task(reload.run())
    reload.request()
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: "check its file system and the network, from which the kinds" in caplog.text)
    goes_on.set()
    task.cancel()
