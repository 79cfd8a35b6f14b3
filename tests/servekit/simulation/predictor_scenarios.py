"""Random scenarios for the simulation of a predictor: a seed makes one, with every kind of arrival and fault."""

from __future__ import annotations

from random import Random

from servekit.dynamic_batching.dynamic_batcher import BatchLimits
from servekit.simulation.predictor import ItemArrival, PredictorFault, PredictorScenario


def make_predictor_scenario(seed: int) -> PredictorScenario:
    """Return a scenario: calm or crowded, with few or many faults."""
    random = Random(seed)
    duration_s = random.choice([0.02, 0.2, 1.0])
    tenants = ["a", "b", "c"][: random.randint(1, 3)]
    longest = random.choice([10, 100, 600])
    limits = BatchLimits(
        max_batch_size=random.choice([1, 2, 8, 32]),
        max_batch_tokens=random.choice([16, 128, 1024]),
        max_delay_s=random.choice([0.0, 0.001, 0.02]),
        max_in_flight=random.choice([1, 2, 2, 3]),
    )
    arrivals = tuple(
        ItemArrival(
            at_s=random.uniform(0.0, duration_s),
            length=random.randint(1, longest),
            tenant=random.choice(tenants),
            priority=random.choice([0, 0, 0, -1, 2]),
            deadline_s=random.choice([None, None, None, random.uniform(0.0, 0.2)]),
            leaves_s=random.choice([None, None, None, random.uniform(0.0, 0.1)]),
            is_deadly=random.random() < 0.02,
        )
        for _ in range(random.randint(1, 80))
    )
    faults = tuple(
        PredictorFault(at_s=random.uniform(0.0, duration_s), kind=random.choice(["kill", "duplicate", "stale"]))
        for _ in range(random.choice([0, 0, 2, 8]))
    )
    return PredictorScenario(
        limits=limits,
        arrivals=arrivals,
        faults=faults,
        batch_s=random.choice([0.0, 1e-3]),
        token_s=random.choice([1e-6, 1e-5]),
        recovery_s=random.choice([0.0, 0.02]),
    )
