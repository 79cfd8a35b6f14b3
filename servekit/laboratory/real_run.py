"""Run a workload with a real model and its worker, and read the result from the engine's journal."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict, deque
from pathlib import Path

from servekit.embedded.async_llm import AsyncLLM
from servekit.embedded.sampling_params import SamplingParams
from servekit.errors import ServekitError
from servekit.laboratory.batching import BatchingMode, Gate
from servekit.laboratory.timeline import Timeline
from servekit.laboratory.virtual_run import LabSettings
from servekit.laboratory.workload import LabRequest, Workload
from servekit.observability.journal import replay_journal
from servekit.protocol.messages import StepPlan
from servekit.scheduler.recording import ReplayWatcher
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager

WARM_UP_TOKENS = 24  # of each warm-up answer: first steps of a process are slower than later ones
JOURNAL_BYTES = 2**40  # one file, however long the run is


class RealRun:
    """Plays one workload in one mode. After `play`, the timeline has all of it, on the clock of the event loop."""

    def __init__(self, workload: Workload, mode: BatchingMode, settings: LabSettings, model: str) -> None:
        self._workload = workload
        self._mode = mode
        self._settings = settings
        self._model = model
        self._tasks: set[asyncio.Task[None]] = set()
        # The arrival times of requests, by the lengths of prompt and answer: a journal knows sequences by these.
        self._arrivals_s: defaultdict[tuple[int, int], deque[float]] = defaultdict(deque)

    async def play(self) -> Timeline:
        """Load the model, play until every answer has ended, and end the worker. Raises ServekitError."""
        scheduler = self._settings.scheduler(self._mode)
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            llm = AsyncLLM(
                self._model,
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                max_steps_in_flight=scheduler.max_steps_in_flight,
                enable_prefix_caching=scheduler.enable_prefix_caching,
                block_size=scheduler.block_size,
                num_kv_blocks=scheduler.num_blocks,
                scheduling_policy=scheduler.scheduling_policy,
                max_model_len=scheduler.max_model_len,
                journal=str(journal),
                journal_max_bytes=JOURNAL_BYTES,
            )
            async with llm:
                await self._warm_up(llm)
                try:
                    await self._play(llm, Gate(self._mode, scheduler.max_num_seqs, self._settings.max_delay_s))
                finally:
                    for task in self._tasks:  # of answers that have not ended, because another one failed
                        task.cancel()
            watcher = _JournalWatcher(self._settings.make_timeline(), self._arrivals_s)
            result = replay_journal(journal, watcher)
        if result.num_restarts:
            raise ServekitError("the worker was lost during the run, so its times are not valid; run it again")
        if result.difference is not None:
            raise ServekitError(f"the journal of the run cannot be replayed: {result.difference}")
        return watcher.timeline

    async def _warm_up(self, llm: AsyncLLM) -> None:
        prompts = [tuple(range(100, 100 + length)) for length in (3, 40, 90)]
        await asyncio.gather(*(self._answer(llm, LabRequest(0.0, prompt, WARM_UP_TOKENS)) for prompt in prompts))

    async def _play(self, llm: AsyncLLM, gate: Gate) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        coming, at_gate = deque(self._workload.requests), deque[LabRequest]()
        while coming or at_gate or self._tasks:
            now_s = loop.time() - began_s
            while coming and coming[0].arrival_s <= now_s:
                at_gate.append(coming.popleft())
            arrivals_s = [request.arrival_s for request in at_gate]
            for _ in range(gate.num_admitted(arrivals_s, len(self._tasks), bool(coming), now_s)):
                request = at_gate.popleft()
                lengths = len(request.prompt), request.num_output_tokens
                self._arrivals_s[lengths].append(began_s + request.arrival_s)
                self._tasks.add(asyncio.create_task(self._answer(llm, request)))
            await self._next_event(
                coming[0].arrival_s - now_s if coming else None,
                gate.opens_s([request.arrival_s for request in at_gate]) - now_s
                if at_gate and not self._tasks
                else None,
            )

    async def _next_event(self, *timeouts_s: float | None) -> None:
        """Wait until an answer has ended, or until the first of these times has passed."""
        timeout_s = min((each for each in timeouts_s if each is not None), default=None)
        timeout_s = None if timeout_s is None or timeout_s == float("inf") else max(0.0, timeout_s)
        if self._tasks:
            done, self._tasks = await asyncio.wait(self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        elif timeout_s is not None:
            await asyncio.sleep(timeout_s)

    @staticmethod
    async def _answer(llm: AsyncLLM, request: LabRequest) -> None:
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0)
        async for _ in llm.generate(list(request.prompt), params, stream=False):
            pass


class _JournalWatcher(ReplayWatcher):
    """Builds the timeline of a run from its journal, beginning after the warm-up."""

    def __init__(self, timeline: Timeline, arrivals_s: dict[tuple[int, int], deque[float]]) -> None:
        self.timeline = timeline
        self._arrivals_s = arrivals_s

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        arrivals_s = self._arrivals_s.get((sequence.prompt_length, sequence.sampling.max_tokens))
        if arrivals_s and arrivals_s[0] <= sequence.arrival_s:
            self.timeline.add(sequence.sequence_id, arrivals_s.popleft(), sequence.prompt_length)

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        if self.timeline.requests:
            self.timeline.planned(manager, plan, now_s)

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        if self.timeline.requests:
            self.timeline.committed(manager, tokens, now_s)
