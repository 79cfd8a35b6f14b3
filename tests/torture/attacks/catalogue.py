"""Name all attacks, and run them as a part of `make torture`."""

from __future__ import annotations

from random import Random

from tests.torture.attacks import (
    adapters,
    bodies,
    connections,
    grammars,
    mix,
    other_models,
    processes,
    queues,
    rows,
    stored_batches,
)
from tests.torture.attacks.claims import finding
from tests.torture.attacks.windows import beside_bystander
from tests.torture.report import Finding

_BESIDE_BYSTANDER = (grammars, bodies, rows, queues, other_models, adapters, stored_batches, mix)
_WITH_SCENARIOS = (grammars, bodies, rows, queues, other_models, adapters, stored_batches, connections, processes)
ATTACKS = {attack.name: attack for module in _BESIDE_BYSTANDER for attack in module.ATTACKS}
SCENARIOS = {scenario.name: scenario for module in _WITH_SCENARIOS for scenario in module.SCENARIOS}


def run(seconds: int, seed: int = 0, only: str | None = None) -> list[Finding]:
    """Run all attacks, or the ones named in `only`, separated by commas; a window takes `seconds`."""
    names = only.split(",") if only else [*ATTACKS, *SCENARIOS]
    if unknown := set(names) - ATTACKS.keys() - SCENARIOS.keys():
        raise SystemExit(f"unknown attack: {', '.join(sorted(unknown))}; they are {', '.join([*ATTACKS, *SCENARIOS])}")
    findings = []
    for name in names:
        if name in ATTACKS:
            claims = beside_bystander(ATTACKS[name], seconds, seed)
        else:
            claims = SCENARIOS[name].run(seconds, Random(seed))
        findings.append(finding(name, claims))
        print(f"  {name}: {findings[-1].measured}", flush=True)
    return findings
