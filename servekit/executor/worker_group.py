"""Run a group of workers, its ranks, that execute each plan together. The caller uses it like one worker.

Each rank holds a part of the model. One of them, the first of the last stage, sends the results. The others acknowledge
each step. The other ranks of the last stage sample the same tokens, and send a digest of them, which is compared with
the result. If one rank ends, the group ends, because the others wait for it in the middle of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec
from msgspec.structs import replace

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.errors import ConfigError, ServekitError, WorkerLost, WorkerTimeout
from servekit.executor.worker_connection import MAX_PENDING_MESSAGES, Answer, Question, WorkerConnection
from servekit.protocol.lora import AdapterLoaded, LoadAdapter, common_answer
from servekit.protocol.messages import (
    BlocksFetched,
    FromWorker,
    LoadModel,
    StepAcknowledged,
    StepFailed,
    StepResult,
    ToWorker,
    WorkerReady,
)

# When a rank ends, the others fail in their next exchange with it, and may report that first. The end of a process is
# known within milliseconds, so the real cause is almost always known after this time.
CAUSE_TIMEOUT_S = 0.1

StartRank = Callable[[int, Callable[[], None]], WorkerConnection]  # (rank, on_loss) -> its connection


class WorkerGroup:
    """The messages to and from all ranks. A lost group stays lost; the first reason counts."""

    def __init__(
        self,
        num_ranks: int,
        result_rank: int,
        start_rank: StartRank,
        on_loss: Callable[[], None],
        rendezvous: str | None = None,
    ) -> None:
        """Start the ranks. Those from `result_rank` on are the last stage. `on_loss` is called when one is lost.

        They find each other by `rendezvous`; by default by a file on this machine.
        """
        self.loss: ServekitError | None = None
        self.cause = "other"  # as of WorkerConnection, or out_of_memory
        self.on_loss = on_loss  # both may be replaced, as those of WorkerConnection
        self.on_leaving: Callable[[], None] = lambda: None
        self.on_fetched: Callable[[BlocksFetched], None] = lambda _: None
        self._fetched: dict[int, dict[int, BlocksFetched]] = {}  # by number and rank, until all ranks have answered
        self.encode = msgspec.msgpack.Encoder().encode
        self._is_lost = asyncio.Event()
        self._failure_timers: list[asyncio.TimerHandle] = []  # of ranks that failed, perhaps because another one ended
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if rendezvous is None:
            self._directory = tempfile.TemporaryDirectory(prefix="servekit-ranks-")
            rendezvous = str(Path(self._directory.name) / "rendezvous")
        self._rendezvous = rendezvous
        self._ranks: list[WorkerConnection] = []
        self._result_rank = result_rank
        # By rank, of all but the one that sends results, what it has answered; None when it is lost.
        self._answers: dict[int, asyncio.Queue[FromWorker | None]] = {
            rank: asyncio.Queue(MAX_PENDING_MESSAGES) for rank in range(num_ranks) if rank != result_rank
        }
        self._readers: list[asyncio.Task[None]] = []
        self._start(num_ranks, start_rank)

    def _start(self, num_ranks: int, start_rank: StartRank) -> None:
        """Start the ranks. If one cannot be started, the group is lost, and `end` ends the others."""
        for rank in range(num_ranks):
            try:
                self._ranks.append(start_rank(rank, partial(self._on_rank_lost, rank)))
            except OSError as error:
                what = f"rank {rank} of {num_ranks} of the model worker did not start: {error}"
                self.mark_lost(WorkerLost(what), "failed")
                return
            self._ranks[-1].on_leaving = self._on_rank_leaving
            self._ranks[-1].on_fetched = partial(self._on_rank_fetched, rank)
        for rank in self._answers:
            self._readers.append(asyncio.create_task(self._read(rank), name=f"reader of rank {rank}"))

    @property
    def stage(self) -> str:
        """What the ranks are doing, as text for log lines: all of them do the same."""
        return self._ranks[-1].stage if self._ranks else "starting the workers"

    @property
    def pid(self) -> int | None:
        """The process id of the rank that sends results."""
        return self._ranks[self._result_rank].pid if self._result_rank < len(self._ranks) else None

    @property
    def name(self) -> str:
        """The names of all ranks."""
        return ", ".join(worker.name for worker in self._ranks)

    @property
    def is_leaving(self) -> bool:
        """Whether a rank has asked to be shut down. Only ranks that have joined do; the others are children."""
        return any(worker.is_leaving for worker in self._ranks)

    # -- calls, as of WorkerConnection --------------------------------------------------------------------------------

    def send(self, message: ToWorker) -> None:
        """Send a message to all ranks. Does not wait."""
        if isinstance(message, LoadModel):
            for rank, worker in enumerate(self._ranks):
                worker.send(replace(message, rank=rank, rendezvous=self._rendezvous))
            return
        if self.loss is not None:
            return  # `receive` raises it
        self.send_payload(self.encode(message))

    def let_go(self) -> None:
        """Send the ranks no more steps, and shut them down when they have answered those in flight. Idempotent."""
        self._ranks[0].let_go()

    def send_payload(self, payload: bytes) -> None:
        """Send a message that is encoded already, and is not LoadModel."""
        for worker in self._ranks:
            worker.send_payload(payload)

    async def receive(self, timeout_s: float | None) -> FromWorker:
        """Return the next result, when all ranks have answered. Raises the loss, like WorkerConnection's.

        Without a timeout, only the silence and the end of a rank are noticed. The WorkerReady of a group tells where
        each rank runs.
        """
        if len(self._ranks) <= self._result_rank:
            assert self.loss is not None
            raise self.loss
        try:
            answer = await self._ranks[self._result_rank].receive(timeout_s)
        except ServekitError:
            await self._is_lost.wait()
            assert self.loss is not None
            raise self.loss from None
        if isinstance(answer, StepFailed):
            self._mark_lost_for_memory(self._result_rank, answer)
        with contextlib.ExitStack() as stack:
            if timeout_s is not None:
                what = f"the ranks of the model worker did not all answer within {timeout_s:.3g} s"
                late = partial(self.mark_lost, WorkerTimeout(what), "step_timeout")
                stack.callback(PauseTolerantTimer(timeout_s, late).cancel)
            given: dict[int, FromWorker] = {self._result_rank: answer}
            for rank, answers in self._answers.items():
                other = await answers.get()
                if other is None:
                    await self._is_lost.wait()
                else:
                    self._check_agreement(rank, answer, other)
                    given[rank] = other
        if self.loss is not None:
            raise self.loss
        if isinstance(answer, WorkerReady):
            each_ready = [each for _, each in sorted(given.items()) if isinstance(each, WorkerReady)]
            return replace(
                answer,
                ranks=tuple(chain.from_iterable(each.ranks for each in each_ready)),
                transfer_addresses=tuple(chain.from_iterable(each.transfer_addresses for each in each_ready)),
            )
        if isinstance(answer, StepResult) and answer.transfers is not None:
            others = (each.transfers for each in given.values() if isinstance(each, StepAcknowledged))
            return replace(answer, transfers=answer.transfers.with_ranks([each for each in others if each is not None]))
        return answer

    async def ask(self, request: Question) -> Answer:
        """Send a request to the rank that sends results, and return its answer: a profile is of that rank.

        All ranks check an adapter, because each of them reads its files, perhaps on a machine of its own.
        """
        if not isinstance(request, LoadAdapter):
            return await self._ranks[self._result_rank].ask(request)
        answers = await asyncio.gather(*(worker.ask(request) for worker in self._ranks))
        return common_answer([answer for answer in answers if isinstance(answer, AdapterLoaded)])

    def fetch(self, number: int, addresses: Sequence[str], keys: tuple[bytes, ...]) -> None:
        """Ask the agent of each rank to fetch its parts of blocks. `on_fetched` gets those that all of them have."""
        self._fetched[number] = {}
        while len(self._fetched) > MAX_PENDING_MESSAGES:  # of ranks that never answered
            del self._fetched[next(iter(self._fetched))]
        for rank, worker in enumerate(self._ranks):
            worker.fetch(number, addresses if len(addresses) == 1 else addresses[rank : rank + 1], keys)

    def _on_rank_fetched(self, rank: int, answer: BlocksFetched) -> None:
        answers = self._fetched.get(answer.number)
        if answers is None:
            return
        answers[rank] = answer
        if len(answers) == len(self._ranks):
            del self._fetched[answer.number]
            self.on_fetched(min(answers.values(), key=lambda each: len(each.keys)))

    async def end(self, graceful: bool = False) -> None:
        """End all ranks. Idempotent."""
        await asyncio.gather(*(worker.end(graceful) for worker in self._ranks))
        for reader in self._readers:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        if self._directory is not None:
            self._directory.cleanup()

    def mark_lost(self, error: ServekitError, cause: str) -> None:
        """Declare all ranks lost. Only the first reason counts."""
        if self.loss is not None:
            return
        self.loss, self.cause = error, cause
        self._is_lost.set()
        for timer in self._failure_timers:
            timer.cancel()
        for worker in self._ranks:
            worker.mark_lost(error, cause)
        self.on_loss()

    # -- the other ranks ----------------------------------------------------------------------------------------------

    async def _read(self, rank: int) -> None:
        """Take what a rank answers, so that its failure is noticed while the others wait for it."""
        answers = self._answers[rank]
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
                self.mark_lost(WorkerLost(f"rank {rank} of the model worker is ahead of the others"), "garbage")
                return
            if answer is None:
                return

    def _on_rank_leaving(self) -> None:
        """Tell the caller once that the group must end, because one of its ranks wants to."""
        if sum(worker.is_leaving for worker in self._ranks) == 1:
            self.on_leaving()

    def _on_rank_lost(self, rank: int) -> None:
        loss, cause = self._ranks[rank].loss, self._ranks[rank].cause
        assert loss is not None
        error = type(loss)(f"rank {rank} of {len(self._ranks)}: {loss.message}")
        if cause == "failed" and not isinstance(loss, ConfigError):
            loop = asyncio.get_running_loop()
            self._failure_timers.append(loop.call_later(CAUSE_TIMEOUT_S, self.mark_lost, error, cause))
        else:
            self.mark_lost(error, cause)

    def _mark_lost_for_memory(self, rank: int, failed: StepFailed) -> None:
        """End the group: the other ranks wait for this one in the middle of a step."""
        what = f"rank {rank} of the model worker ran out of memory: {failed.message}"
        self.mark_lost(WorkerLost(what), "out_of_memory")

    def _check_agreement(self, rank: int, answer: FromWorker, other: FromWorker) -> None:
        """Check that a rank's answer fits the result; otherwise the group is lost."""
        if self.loss is not None:
            return
        if isinstance(answer, WorkerReady) and isinstance(other, WorkerReady):
            agrees = (answer.model, answer.num_blocks) == (other.model, other.num_blocks)
        elif isinstance(answer, StepResult) and isinstance(other, StepAcknowledged):
            expected = StepAcknowledged.of(answer)
            if rank < self._result_rank:
                expected = replace(expected, digest=b"")  # this stage samples nothing
            # Each rank transfers its own part of the blocks, with its own success.
            has_transferred = (answer.transfers is None) == (other.transfers is None)
            agrees = has_transferred and replace(other, transfers=expected.transfers) == expected
        else:
            agrees = False
        if not agrees:
            what = f"rank {rank} of the model worker answered {type(other).__name__}, which does not fit"
            what += f" rank {self._result_rank}'s {type(answer).__name__}"
            if isinstance(answer, WorkerReady) and isinstance(other, WorkerReady):
                what += f": {other.difference(answer) or 'it has another number of KV blocks'}"
            self.mark_lost(WorkerLost(what), "garbage")
