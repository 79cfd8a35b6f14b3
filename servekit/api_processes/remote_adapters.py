"""Represent the model's LoRA adapters in an API process. The engine process has the adapters and their places."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from msgspec import Struct

from servekit.api_processes import messages as ms
from servekit.engine.adapter_registry import AdapterUse
from servekit.protocol.lora import LoraAdapter


class EngineProcess(Protocol):
    """The part of EngineClient that is used here: messages to the engine process, and its answers."""

    @property
    def send(self) -> Callable[[Struct], None]: ...

    def next_question_id(self) -> int: ...

    async def ask(self, question: ms.Question[Any], kind: Any) -> Any: ...


class RemoteAdapters:
    """The adapters that the engine process has reported."""

    def __init__(self, engine_process: EngineProcess) -> None:
        self._engine_process = engine_process
        self._paths: dict[str, str] = {}
        self._uses = itertools.count()

    @property
    def paths(self) -> Mapping[str, str]:
        """The directory of each adapter, by name."""
        return self._paths

    def change(self, changes: ms.AdapterChanges) -> None:
        """Note what the engine process has loaded and unloaded."""
        for name in changes.unloaded:
            self._paths.pop(name, None)
        self._paths |= changes.loaded
        self._engine_process.send(ms.AdaptersKnown(changes.version))

    async def load(self, name: str, path: str) -> None:
        """Load an adapter for all API processes. Raises InvalidRequest or WorkerError."""
        question_id = self._engine_process.next_question_id()
        await self._engine_process.ask(ms.LoadAdapter(question_id=question_id, name=name, path=path), None)

    async def unload(self, name: str) -> None:
        """Unload an adapter. Requests that use it continue. Raises ModelNotFound."""
        question_id = self._engine_process.next_question_id()
        await self._engine_process.ask(ms.UnloadAdapter(question_id=question_id, name=name), None)

    def begin_use(self, name: str, tenant: str) -> AdapterUse | None:
        """Return None: only the engine process knows which adapters have places."""
        return None

    async def wait_for_use(self, name: str, tenant: str) -> AdapterUse:
        """Use an adapter as soon as it has a place. Raises ModelNotFound or QueueFull."""
        number = next(self._uses)
        release = partial(self._engine_process.send, ms.ReleaseAdapter(number))
        question_id = self._engine_process.next_question_id()
        question = ms.UseAdapter(question_id=question_id, use=number, name=name, tenant=tenant)
        try:
            adapter = await self._engine_process.ask(question, LoraAdapter)
        except BaseException:  # the client has left, or the engine process is slow: it may give a place all the same
            release()
            raise
        return AdapterUse(adapter, release)
