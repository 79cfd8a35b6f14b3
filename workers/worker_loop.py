"""Run a worker's main loop: receive a message, execute it, send the answer; a thread sends heartbeats."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod

from servekit.errors import ConfigError
from servekit.protocol.framing import MessageReceiver, MessageSender
from servekit.protocol.messages import HEARTBEAT_S, FromWorker, Heartbeat, Shutdown, ToWorker, WorkerFailed
from workers.device.heap import HeapTrimmer

log = logging.getLogger("servekit.worker")


class WorkerLoop(ABC):
    """One worker process, from its first message to its end. Subclasses say what messages mean."""

    def __init__(self, tasks: MessageReceiver[ToWorker], results: MessageSender[FromWorker]) -> None:
        self.tasks = tasks
        self._results = results
        self._sending = threading.Lock()  # answers and heartbeats share the pipe

    @abstractmethod
    def execute(self, message: ToWorker) -> None:
        """Execute a message, and send its answer, now or later."""

    def receive(self) -> ToWorker:
        """Wait for a message."""
        return self.tasks.receive()

    def run(self) -> int:
        """Serve until a Shutdown message, or until the server's process ends; return the exit code."""
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        try:
            while not isinstance(message := self.receive(), Shutdown):
                self.execute(message)
        except (EOFError, BrokenPipeError):
            log.warning("the server process that started this worker has ended; stopping")
        except ConfigError as error:
            self.send(WorkerFailed(error.message, is_config_error=True))
            return 2
        except Exception as error:
            log.exception("the worker failed")
            self.send(WorkerFailed(f"the model worker failed: {type(error).__name__}: {error}"))
            return 1
        return 0

    def send(self, message: FromWorker) -> None:
        """Send a message to the server."""
        with self._sending:
            self._results.send(message)

    def _beat(self) -> None:
        """Send heartbeats for the whole life of the process, also during long steps, and keep its heap small."""
        heap = HeapTrimmer()
        with contextlib.suppress(OSError):
            while True:
                time.sleep(HEARTBEAT_S)
                self.send(Heartbeat())
                heap.trim_if_grown()
