"""Simulate a device and a model: steps take the time that a formula gives, and answers are bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from servekit.protocol.block_ring import BlockRing
from servekit.protocol.lora import AdapterLoaded, LoraAdapter
from servekit.protocol.messages import (
    MAX_LISTED_KEYS,
    BlocksListed,
    LoadModel,
    ModelInfo,
    StepPlan,
    StepResult,
    TransferReport,
    WorkerReady,
)
from servekit.simulation.model import DEFAULT_MAX_MODEL_LEN, SimulatedModel, parse_simulated
from servekit.simulation.page import Page
from servekit.simulation.worker import NO_DRAFTS, VOCAB_SIZE, SimulatedConnector, SimulatedWorker
from workers.runner.interface import Pending, done

KV_TOKENS = 2**20  # tokens in the pool, if the settings give no number of blocks; a page is a list of numbers
KV_BYTES_PER_TOKEN = 8


class SimulatedRunner:
    """Executes a step at once, and returns its result when a real device would have finished it."""

    runs_ahead = False

    def __init__(self, model: SimulatedModel, worker: SimulatedWorker, is_drafting: bool = False) -> None:
        self._model = model
        self._is_drafting = is_drafting
        self._worker = worker

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        started = time.monotonic()
        result = self._worker.execute(plan, drafts=self._drafts(plan) if self._is_drafting else NO_DRAFTS)
        remaining_s = started + self._model.duration_s(plan) - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)
        result = replace(result, step_time_s=time.monotonic() - started)
        return done(result)

    def load_adapter(self, adapter: LoraAdapter) -> AdapterLoaded:
        """Accept any directory as an adapter, without effect."""
        return AdapterLoaded("" if Path(adapter.path).is_dir() else f"{adapter.path!r} is no directory")

    def list_blocks(self, start: int) -> BlocksListed:
        """Return the blocks that other workers have sent. A new simulated worker holds no others."""
        connector = self._worker.connector
        keys = connector.keys() if isinstance(connector, RingConnector) else []
        return BlocksListed(tuple(keys[start : start + MAX_LISTED_KEYS]))

    def _drafts(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        """How many drafts are made for each slot, and how many of them are right."""
        return {
            chunk.slot: (chunk.num_drafts, self._model.num_accepted(chunk.num_drafts, plan.step_id, chunk.slot))
            for chunk in plan.chunks
            if chunk.num_drafts
        }


class RingConnector:
    """Hands simulated blocks over, through the memory that real workers use. Its transfers take no time."""

    def __init__(self, rings: list[BlockRing], own: BlockRing | None) -> None:
        self._rings = rings
        self._own = own

    def keys(self) -> list[bytes]:
        """The blocks that can be loaded."""
        return [key for ring in self._rings for key in ring.list_keys()]

    def execute(self, plan: StepPlan, pages: list[Page]) -> TransferReport:
        """Load what a plan says."""
        dropped = [key for ring in self._rings for key in ring.refresh()]
        failed = [index for index, (key, block) in enumerate(plan.loads) if not self._load(key, block, pages)]
        return TransferReport(tuple(failed), tuple(dropped), num_received=len(plan.loads) - len(failed))

    def send(self, plan: StepPlan, pages: list[Page], report: TransferReport) -> TransferReport:
        """Send what a plan says, behind its step."""
        ring = self._own
        if ring is None or not plan.sends:
            return report
        dropped = list(report.dropped_keys)
        for block, key in plan.sends:
            (row,) = ring.next_rows(1)
            ring.rows[row].view(np.int64)[:] = pages[block].states
            ring.append([key])
            dropped += ring.refresh()
        return replace(report, dropped_keys=tuple(dropped), num_sent=len(plan.sends), block_bytes=ring.rows.shape[1])

    def damage(self, number: int) -> None:
        """Do nothing: blocks are damaged in simulations only."""

    def _load(self, key: bytes, block: int, pages: list[Page]) -> bool:
        ring = next((ring for ring in self._rings if key in ring), None)
        if ring is None:
            return False
        blocks, is_right = ring.read([key])
        pages[block] = Page.of(blocks[0].view(np.int64).tolist())
        return bool(is_right[0])


def load(settings: LoadModel, report_stage: Callable[[str], None]) -> tuple[SimulatedRunner, WorkerReady]:
    """Return a runner after the time that loading would take. Raises ConfigError for a malformed model path."""
    model = parse_simulated(settings.model_path)
    report_stage("pretending to load weights")
    time.sleep(model.load_s)
    num_blocks = settings.num_kv_blocks or -(-KV_TOKENS // settings.block_size)
    num_transfer_blocks = 0
    connector: SimulatedConnector | RingConnector | None = None
    if settings.kv_offload_memory_bytes:  # only in memory, and its transfers take no time
        bytes_per_block = KV_BYTES_PER_TOKEN * settings.block_size
        connector = SimulatedConnector(max(1, settings.kv_offload_memory_bytes // bytes_per_block))
    if settings.kv_transfer_fds:
        own, bytes_per_block = settings.kv_transfer_own, KV_BYTES_PER_TOKEN * settings.block_size
        layout = b"simulated blocks"
        rings = [
            BlockRing(fd, bytes_per_block, layout, is_writer=number in (own, settings.kv_transfer_inbox))
            for number, fd in enumerate(settings.kv_transfer_fds)
        ]
        own_ring = None if own is None else rings[own]
        if own_ring is not None and settings.kv_transfer_inbox is None:
            rings = [own_ring]
        connector = RingConnector(rings, own_ring)
        num_transfer_blocks = 0 if own_ring is None else own_ring.max_readable
    worker = SimulatedWorker(
        num_blocks, settings.block_size, settings.max_num_batched_tokens, model.drafting_s, connector
    )
    info = ModelInfo(
        architecture="Simulated",
        num_parameters=0,
        vocab_size=VOCAB_SIZE,
        max_model_len=settings.max_model_len or DEFAULT_MAX_MODEL_LEN,
        eos_token_ids=(),
        default_temperature=0.0,
        default_top_k=0,
        default_top_p=1.0,
    )
    ready = WorkerReady(
        info, "simulated", "none", num_blocks, KV_BYTES_PER_TOKEN, model.load_s, num_transfer_blocks=num_transfer_blocks
    )
    return SimulatedRunner(model, worker, settings.speculative.is_on), ready
