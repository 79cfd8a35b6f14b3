"""The profiler's switch: what the worker does in its steps, from one request to another, as a file in --profile.

The worker records and writes; that it does is known to it alone. So one that is lost takes with it what it had
recorded, and nothing here has to be put right.
"""

from __future__ import annotations

import os
from pathlib import Path

from servekit.config import ServeConfig
from servekit.errors import ConfigError, InternalError, RequestError
from servekit.messages import Profiled, StartProfile, StopProfile
from servekit.model_executor import ModelExecutor
from servekit.simulated_model import is_simulated

# A step is some thousand events of some hundred bytes, and a person who looks at a trace looks at a few steps.
MAX_STEPS = 200


class ProfilerRefuses(RequestError):
    """Steps are not recorded here, or are already, or were not."""

    status = 409
    code = "profiler_refuses"


class Profiling:
    """For one engine, whichever worker it has at the moment."""

    def __init__(self, config: ServeConfig, executor: ModelExecutor) -> None:
        self._directory = None if config.profile is None else Path(config.profile).resolve()
        self._is_simulated = is_simulated(config.model)
        self._executor = executor

    def prepare(self) -> None:
        """There is to be a directory that can be written to. Raises ConfigError."""
        if self._directory is None:
            return
        why = "it cannot be written to"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if os.access(self._directory, os.W_OK | os.X_OK):
                return
        except OSError as error:
            why = str(error.strerror)
        raise ConfigError(f"profile = {str(self._directory)!r}: {why}; choose another --profile")

    async def start(self) -> int:
        """Begin to record; returns how many steps are recorded at most. Raises ProfilerRefuses or WorkerError."""
        _checked(await self._executor.ask(StartProfile(self._checked_directory(), MAX_STEPS)))
        return MAX_STEPS

    async def stop(self) -> Profiled:
        """Write down what was recorded. Raises ProfilerRefuses, WorkerError, or InternalError for what did not work."""
        self._checked_directory()
        return _checked(await self._executor.ask(StopProfile()))

    def _checked_directory(self) -> str:
        if self._directory is None:
            raise ProfilerRefuses("this server was started without a place for traces; start it with --profile DIR")
        if self._is_simulated:
            raise ProfilerRefuses("the model is simulated, and its steps compute nothing")
        return str(self._directory)


def _checked(told: Profiled) -> Profiled:
    if told.refusal:
        raise ProfilerRefuses(told.refusal)
    if told.failure:
        raise InternalError(told.failure)
    return told
