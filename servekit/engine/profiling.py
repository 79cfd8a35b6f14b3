"""Start and stop the worker's profiler. It records the steps between two requests to a file in --profile.

The worker records and writes the profile, and only the worker knows that it is recording. If it is lost, the recording
is lost with it, and no state here becomes invalid.
"""

from __future__ import annotations

import os
from pathlib import Path

from servekit.config import ServeConfig
from servekit.errors import ConfigError, InternalError, RequestError
from servekit.executor.model_executor import ModelExecutor
from servekit.executor.worker_connection import Answer
from servekit.protocol.messages import Profiled, StartProfile, StopProfile
from servekit.simulation.model import is_simulated

# A step is some thousand events of some hundred bytes, and a person looks at a few steps of a profile.
MAX_STEPS = 200


class ProfilerRefuses(RequestError):
    """Profiling is disabled, or has been started already, or has not been started."""

    status = 409
    code = "profiler_refuses"


class Profiling:
    """The profiler of one engine's worker, which may be replaced."""

    def __init__(self, config: ServeConfig, executor: ModelExecutor) -> None:
        self._directory = None if config.profile is None else Path(config.profile).resolve()
        self._is_simulated = is_simulated(config.model)
        self._executor = executor

    def prepare(self) -> None:
        """Create the directory of --profile, and check that it is writable. Raises ConfigError."""
        if self._directory is None:
            return
        reason = "the directory is not writable"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if os.access(self._directory, os.W_OK | os.X_OK):
                return
        except OSError as error:
            reason = str(error.strerror)
        raise ConfigError(f"profile = {str(self._directory)!r}: {reason}; choose another --profile")

    async def start(self) -> int:
        """Start recording; return the limit on recorded steps. Raises ProfilerRefuses or WorkerError."""
        _checked(await self._executor.ask(StartProfile(self._checked_directory(), MAX_STEPS)))
        return MAX_STEPS

    async def stop(self) -> Profiled:
        """Stop recording and write the profile. Raises ProfilerRefuses, WorkerError or InternalError."""
        self._checked_directory()
        return _checked(await self._executor.ask(StopProfile()))

    def _checked_directory(self) -> str:
        if self._directory is None:
            raise ProfilerRefuses("profiling is disabled; start the server with --profile DIR")
        if self._is_simulated:
            raise ProfilerRefuses("a simulated model cannot be profiled, because its steps compute nothing")
        return str(self._directory)


def _checked(answer: Answer) -> Profiled:
    assert isinstance(answer, Profiled), "the connection checks the answer's type"
    if answer.refusal:
        raise ProfilerRefuses(answer.refusal)
    if answer.failure:
        raise InternalError(answer.failure)
    return answer
