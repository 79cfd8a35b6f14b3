"""Define the value with which the listener gives a worker that has joined to the engine."""

from __future__ import annotations

from msgspec import Struct

from servekit.executor.worker_connection import WorkerConnection
from servekit.executor.worker_group import WorkerGroup
from servekit.protocol.handshake import Offer
from servekit.protocol.messages import WorkerReady


class JoinedWorker(Struct, frozen=True):
    """A worker that has joined: authenticated, with the model loaded, and ready for steps."""

    connection: WorkerConnection | WorkerGroup  # a group, if its ranks have joined one by one
    offer: Offer
    ready: WorkerReady
