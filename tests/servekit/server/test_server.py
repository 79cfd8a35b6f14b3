"""SIGHUP without a keys file, by calling its handler."""

from __future__ import annotations

import asyncio
import signal
from functools import partial

from servekit.api.app import create_app, replace_keys
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.server.keys_file import KeysReload
from servekit.server.server import Server, _on_hangup


async def test_hangup_without_a_keys_file_drains_and_repeats_count_once() -> None:
    engine = LLMEngine(ServeConfig())
    app = create_app(engine)
    server = Server(app, engine)
    reload = KeysReload(partial(replace_keys, app), engine.config)
    _on_hangup(server, reload)
    _on_hangup(server, reload)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.state == "draining" and not server.force_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
