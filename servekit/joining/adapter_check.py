"""Check that a worker on another machine has the LoRA adapters of its server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from servekit.executor.worker_connection import Answer, Question
from servekit.protocol.lora import AdapterLoaded, LoadAdapter, LoraAdapter


class Asked(Protocol):
    """A worker that can be asked."""

    async def ask(self, request: Question) -> Answer:
        """Return the answer. Raises WorkerError."""


async def adapter_refusal(worker: Asked, adapters: Iterable[LoraAdapter]) -> str | None:
    """Return why a worker cannot serve one of these adapters, which have fingerprints; None if it can serve all.

    Raises WorkerError.
    """
    for adapter in list(adapters):
        answer = await worker.ask(LoadAdapter(adapter))
        assert isinstance(answer, AdapterLoaded), "the connection checks the answer's type"
        if answer.refusal:
            return (
                f"it cannot serve the LoRA adapter {adapter.name!r} in {adapter.path}: {answer.refusal}; copy the "
                "adapter to this machine, or unload it at the server"
            )
        if answer.fingerprint != adapter.fingerprint:
            return (
                f"its files of the adapter {adapter.name!r}, in {adapter.path}, are not those of other workers; copy "
                "the adapter to this machine again"
            )
    return None
