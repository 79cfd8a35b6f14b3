"""SIGHUP, by calling its handler."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from servekit.api.app import create_app
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.server.server import Server, _on_hangup, read_keys

KEYS = "[[key]]\nkey = 'one'\ntenant = 'a'\n"


async def test_hangup_reloads_the_keys_file_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    config = ServeConfig(api_keys_file=str(path), api_key="setting")
    engine = LLMEngine(config)
    app = create_app(engine, read_keys(config))
    server = Server(app, engine)

    def known() -> list[str]:
        return [key for key in ("setting", "one", "two") if app.state.keyring.find(key.encode())]

    path.write_text(KEYS.replace("one", "two"))
    assert known() == ["setting", "one"]
    _on_hangup(app, server)
    assert known() == ["setting", "two"]
    for wrong in ("", KEYS[:-5], KEYS + KEYS):
        path.write_text(wrong)
        _on_hangup(app, server)
        assert known() == ["setting", "two"]
    path.unlink()
    _on_hangup(app, server)
    assert known() == ["setting", "two"]
    assert engine.state == "loading", "it did not begin to drain"


async def test_hangup_without_a_keys_file_drains_and_repeats_count_once() -> None:
    engine = LLMEngine(ServeConfig())
    app = create_app(engine)
    server = Server(app, engine)
    _on_hangup(app, server)
    _on_hangup(app, server)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.state == "draining" and not server.force_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
