"""Play scenarios of new seeds for a while; a scenario that fails is shrunk and saved as a test.

python -m tests.servekit.simulation.simulate --seconds 60 [--first-seed 1234] [--replay]

With --replay each scenario is recorded as well, and replayed from its start and from its checkpoints.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from servekit.scheduler.recording import CheckpointRecord
from servekit.simulation.scenario import Scenario
from servekit.simulation.service import Simulation
from tests.servekit.simulation.recorded import record_scenario, replay
from tests.servekit.simulation.scenarios import failure, make_scenario, shrink

CORPUS = Path(__file__).parent / "corpus"


def save(scenario: Scenario, name: str) -> Path:
    path = CORPUS / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")
    return path


def report(seed: int, error: Exception) -> None:
    """Print what failed, and save the smallest scenario that fails in the same way."""
    print(f"\nseed {seed} fails: {type(error).__name__}: {error}\nshrinking …", flush=True)
    smallest = shrink(make_scenario(seed), lambda scenario: type(failure(scenario)) is type(error))
    path = save(smallest, f"seed-{seed}")
    arrivals, faults = len(smallest.arrivals), len(smallest.faults)
    print(f"{arrivals} arrivals and {faults} faults are enough: {failure(smallest)}")
    print(f"saved as {path}; `make test` plays it from now on. Commit it together with the fix.")


def check_replay(seed: int) -> None:
    """Raises ReplayDifferenceError."""
    scenario = make_scenario(seed)
    records = record_scenario(scenario, checkpoint_rate=0.01).records()
    replay(scenario, records)
    for index, record in enumerate(records):
        if isinstance(record, CheckpointRecord):
            replay(scenario, records[index : index + 200])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first-seed", type=int, default=None, help="default: one that was never used")
    parser.add_argument("--replay", action="store_true", help="record and replay each scenario, too")
    arguments = parser.parse_args()
    first_seed = arguments.first_seed if arguments.first_seed is not None else int(time.time() * 10)
    started = shown = time.monotonic()
    num_steps, seed = 0, first_seed
    while (now := time.monotonic()) < started + arguments.seconds:
        simulation = Simulation(make_scenario(seed))
        try:
            simulation.run()
        except Exception as error:
            report(seed, error)
            return 1
        if arguments.replay:
            check_replay(seed)
        num_steps += simulation.num_steps
        seed += 1
        if now > shown + 1:
            shown = now
            print(f"\r{num_steps:>12,} steps, {seed - first_seed:,} seeds", end="", flush=True)
    elapsed_s = time.monotonic() - started
    print(
        f"\r{num_steps:,} steps of {seed - first_seed:,} seeds ({first_seed} to {seed - 1}) in {elapsed_s:.0f} s, "
        f"{60 * num_steps / elapsed_s:,.0f} a minute; nothing failed"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
