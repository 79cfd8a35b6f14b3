"""Play scenarios from ever new seeds for a while; what fails is shrunk and saved as a test.

python -m tests.sim.simulate --seconds 60 [--first-seed 1234]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from servekit.simulation import Scenario, Simulation
from tests.sim.scenarios import failure, make_scenario, shrink

CORPUS = Path(__file__).parent / "corpus"


def save(scenario: Scenario, name: str) -> Path:
    path = CORPUS / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")
    return path


def report(seed: int, error: Exception) -> None:
    """Say what failed, and leave the smallest scenario that fails in the same way behind."""
    print(f"\nseed {seed} fails: {type(error).__name__}: {error}\nshrinking …", flush=True)
    smallest = shrink(make_scenario(seed), lambda scenario: type(failure(scenario)) is type(error))
    path = save(smallest, f"seed-{seed}")
    arrivals, faults = len(smallest.arrivals), len(smallest.faults)
    print(f"{arrivals} arrivals and {faults} faults are enough: {failure(smallest)}")
    print(f"saved as {path}; `make test` plays it from now on. Commit it together with what mends it.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first-seed", type=int, default=None, help="by default, one nobody has used yet")
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
