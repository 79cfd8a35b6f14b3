"""The state of one admitted prediction, and what was computed of its inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from servekit.dynamic_batching.item import Item
from servekit.engine.caller import Caller
from servekit.errors import ServekitError


class PredictionState:
    """A prediction that was admitted. Await its `results`, or `abort` it."""

    def __init__(self, caller: Caller, num_inputs: int, num_tokens: int, abort: Callable[[Any], None]) -> None:
        self.caller = caller
        self.num_inputs = num_inputs
        self.num_tokens = num_tokens  # of all inputs; an image has none
        self.num_missing = num_inputs  # inputs without a result
        self._abort = abort
        self._results: list[bytes] = [b""] * num_inputs
        self._done: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    @property
    def is_done(self) -> bool:
        """Whether there are results, or an error."""
        return self._done.done()

    async def results(self) -> Sequence[bytes]:
        """Wait for what was computed: numbers of 32 bits for each input. Raises ServekitError; then all are lost."""
        return await asyncio.shield(self._done)

    def put(self, index: int, result: bytes) -> None:
        """Take the result of an input."""
        self._results[index] = result
        self.num_missing -= 1
        if not self.num_missing and not self._done.done():
            self._done.set_result(self._results)

    def fail(self, error: ServekitError) -> None:
        """Report an error to the waiting caller. The first one counts."""
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # there may be no caller any more

    def abort(self) -> None:
        """End what is left of the prediction. Does not await, so it may be called in a `finally` clause."""
        self._abort(self)


class BatchedPrediction(PredictionState):
    """A prediction whose inputs are items of this server's own batches."""

    def __init__(self, caller: Caller, items: list[Item], abort: Callable[[BatchedPrediction], None]) -> None:
        super().__init__(caller, len(items), sum(item.length for item in items), abort)
        self.items = items  # one for each input, in order
