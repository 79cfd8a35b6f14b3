"""Record a scenario's commands in memory, and replay them."""

from __future__ import annotations

import random

import msgspec

from servekit.scheduler.checkpoint import ManagerState
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.recording import CommandRecord, ErrorRecord, Record, RecordedManager, RecordEncoder, Replayer
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.scenario import Scenario
from servekit.simulation.service import RecklessPredictor, Simulation
from tests.servekit.simulation.scenarios import recordable

KEY = bytes(16)


class ListSink:
    """Keeps records in a list, and asks for checkpoints at random."""

    def __init__(self, checkpoint_rate: float = 0.0, seed: int = 0) -> None:
        self.kept: list[CommandRecord | ErrorRecord | ManagerState] = []
        self.failures: list[Exception] = []
        self.is_recording = True
        self.is_checkpoint_due = self.is_checkpoint_overdue = False
        self._rng = random.Random(seed)
        self._checkpoint_rate = checkpoint_rate

    def fail(self, error: Exception) -> None:
        self.failures.append(error)
        self.is_recording = False

    def put(self, record: CommandRecord | ErrorRecord | ManagerState) -> None:
        self.kept.append(record)
        self.is_checkpoint_due = self._rng.random() < self._checkpoint_rate
        self.is_checkpoint_overdue = self._rng.random() < self._checkpoint_rate

    def records(self) -> list[Record]:
        """The records, as they are read from a file."""
        checkpoint = RecordEncoder(KEY).encode_checkpoint
        records = [checkpoint(each) if isinstance(each, ManagerState) else each for each in self.kept]
        return msgspec.msgpack.decode(msgspec.msgpack.encode(records), type=list[Record])


def record_scenario(scenario: Scenario, checkpoint_rate: float = 0.0) -> ListSink:
    sink = ListSink(checkpoint_rate)

    def make_manager(config: SchedulerConfig, predictor: OutputLengthPredictor) -> WorkloadManager:
        return RecordedManager(config, sink, RecordEncoder(KEY), predictor)

    Simulation(recordable(scenario), check=False, make_manager=make_manager).run()
    return sink


def replay(scenario: Scenario, records: list[Record]) -> Replayer:
    """Raises ReplayDifferenceError."""
    replayer = Replayer(scenario.scheduler, RecklessPredictor if scenario.is_reckless else OutputLengthPredictor)
    for record in records:
        replayer.apply(record)
    return replayer
