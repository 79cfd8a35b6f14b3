"""Several workers, the ranks of a group, that execute each plan together: to its caller, one worker.

Each rank holds a part of every layer. Rank 0 sends the results. The others acknowledge each step with a digest of the
tokens that they sampled, which must be rank 0's. The end of one rank is the end of the group, because the others wait
for it in the middle of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.errors import ServekitError, WorkerLost, WorkerTimeout
from servekit.executor.worker_connection import MAX_PENDING_MESSAGES, WorkerConnection
from servekit.protocol.messages import (
    FromWorker,
    LoadModel,
    Profiled,
    StartProfile,
    StepAcknowledged,
    StepFailed,
    StepResult,
    StopProfile,
    ToWorker,
    WorkerReady,
)

StartRank = Callable[[int, Callable[[], None]], WorkerConnection]  # (rank, on_loss) -> its connection


class WorkerGroup:
    """The messages to and from all ranks. A lost group stays lost; the first reason counts."""

    is_leaving = False  # the ranks are children of the server, which end with it

    def __init__(self, size: int, start_rank: StartRank, on_loss: Callable[[], None]) -> None:
        """Start `size` ranks. `on_loss` is called when one of them is lost."""
        self.loss: ServekitError | None = None
        self.cause = "other"  # as of WorkerConnection, or out_of_memory
        self._on_loss = on_loss
        self._directory = tempfile.TemporaryDirectory(prefix="servekit-ranks-")
        self._ranks: list[WorkerConnection] = []
        for rank in range(size):
            self._ranks.append(start_rank(rank, partial(self._on_rank_lost, rank)))
        # Of each rank but the first, what it has answered; None when it is lost.
        self._answers = [asyncio.Queue[FromWorker | None](MAX_PENDING_MESSAGES) for _ in self._ranks[1:]]
        self._readers = [
            asyncio.create_task(self._read(rank), name=f"reader of rank {rank}") for rank in range(1, size)
        ]

    @property
    def stage(self) -> str:
        """What rank 0 is doing, as text for people; the others do the same."""
        return self._ranks[0].stage

    @property
    def pid(self) -> int | None:
        """The process id of rank 0."""
        return self._ranks[0].pid

    # -- calls, as of WorkerConnection --------------------------------------------------------------------------------

    def send(self, message: ToWorker) -> None:
        """Send a message to all ranks. Does not wait."""
        if isinstance(message, LoadModel):
            rendezvous = str(Path(self._directory.name) / "rendezvous")
            for rank, worker in enumerate(self._ranks):
                worker.send(replace(message, rank=rank, rendezvous=rendezvous))
            return
        payload = self._ranks[0].encode(message)
        for worker in self._ranks:
            worker.send_payload(payload)

    async def receive(self, timeout_s: float) -> FromWorker:
        """Rank 0's next answer, when all ranks have given theirs. Raises the loss, like WorkerConnection's."""
        try:
            answer = await self._ranks[0].receive(timeout_s)
        except ServekitError as error:
            raise self.loss or error from None
        if isinstance(answer, StepFailed):
            self._mark_lost_for_memory(0, answer)
        what = f"the ranks of the model worker did not all answer within {timeout_s:.3g} s"
        timer = PauseTolerantTimer(timeout_s, lambda: self.mark_lost(WorkerTimeout(what), "step_timeout"))
        try:
            for rank, answers in enumerate(self._answers, start=1):
                self._check_agreement(rank, answer, await answers.get())
        finally:
            timer.cancel()
        if self.loss is not None:
            raise self.loss
        return answer

    async def ask(self, request: StartProfile | StopProfile) -> Profiled:
        """Send a request to rank 0, and return its answer. A profile is rank 0's."""
        return await self._ranks[0].ask(request)

    async def end(self, graceful: bool = False) -> None:
        """End all ranks. Idempotent."""
        await asyncio.gather(*(worker.end(graceful) for worker in self._ranks))
        for reader in self._readers:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        self._directory.cleanup()

    def mark_lost(self, error: ServekitError, cause: str) -> None:
        """Declare all ranks lost. Only the first reason counts."""
        if self.loss is not None:
            return
        self.loss, self.cause = error, cause
        for worker in self._ranks:
            worker.mark_lost(error, cause)
        self._on_loss()

    # -- the other ranks ----------------------------------------------------------------------------------------------

    async def _read(self, rank: int) -> None:
        """Take what a rank answers, so that its failure is noticed while the others wait for it."""
        answers = self._answers[rank - 1]
        while True:
            try:
                answer = await self._ranks[rank].receive(None)
            except ServekitError:
                answer = None  # `loss` says why
            if isinstance(answer, StepFailed):
                self._mark_lost_for_memory(rank, answer)
            try:
                answers.put_nowait(answer)
            except asyncio.QueueFull:
                self.mark_lost(WorkerLost(f"rank {rank} of the model worker is ahead of rank 0"), "garbage")
                return
            if answer is None:
                return

    def _on_rank_lost(self, rank: int) -> None:
        loss, cause = self._ranks[rank].loss, self._ranks[rank].cause
        assert loss is not None
        self.mark_lost(type(loss)(f"rank {rank} of {len(self._ranks)}: {loss.message}"), cause)

    def _mark_lost_for_memory(self, rank: int, failed: StepFailed) -> None:
        """End the group: the other ranks wait for this one in the middle of a step."""
        what = f"rank {rank} of the model worker ran out of memory: {failed.message}"
        self.mark_lost(WorkerLost(what), "out_of_memory")

    def _check_agreement(self, rank: int, answer: FromWorker, other: FromWorker | None) -> None:
        """Check that a rank answered the same as rank 0; otherwise the group is lost."""
        if other is None or self.loss is not None:
            return
        if isinstance(answer, WorkerReady) and isinstance(other, WorkerReady):
            agrees = (answer.model, answer.num_blocks) == (other.model, other.num_blocks)
        elif isinstance(answer, StepResult):
            agrees = other == StepAcknowledged.of(answer)
        else:
            agrees = False
        if not agrees:
            what = f"rank {rank} of the model worker answered {type(other).__name__} that does not match rank 0's"
            self.mark_lost(WorkerLost(f"{what} {type(answer).__name__}"), "garbage")
