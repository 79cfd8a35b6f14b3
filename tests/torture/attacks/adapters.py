"""Attacks with LoRA adapters: another adapter with each request, and long answers that hold all places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.torture.attacks.attacker import Attack, Attacker
from tests.torture.attacks.claims import Scenario
from tests.torture.attacks.modest import modest_beside
from tests.torture.report import BUILD

NUM_ADAPTERS = 12
MAX_LORAS = 4
NUM_SWAPPING = 8
NUM_HOLDING = 16
SERVED_WITHIN_S = 2.0
OWN = "a0"  # the adapter of the modest tenant
SHORT = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


@contextmanager
def _with_adapters() -> Iterator[tuple[str, ...]]:
    from transformers import AutoModelForCausalLM

    from servekit.engine.model_files import DEMO_MODEL_PATH
    from tests.support.lora_adapters import make_adapter

    folder = BUILD / "attack-adapters"
    names = [f"a{number}" for number in range(NUM_ADAPTERS)]
    if not (folder / names[-1] / "adapter_config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH)
        for number, name in enumerate(names):
            make_adapter(folder / name, model, number)
    flags = [flag for name in names for flag in ("--lora", f"{name}={folder / name}")]
    yield (*flags, "--max-loras", str(MAX_LORAS), "--max-lora-rank", "8")


async def _any_adapter(attacker: Attacker) -> None:
    """Ask for a short answer with an adapter that was not used lately, and so has to be read."""
    name = f"a{attacker.number() % NUM_ADAPTERS}"
    await attacker.post("/v1/completions", SHORT | {"model": name})


async def _one_adapter(attacker: Attacker) -> None:
    await attacker.post("/v1/completions", SHORT | {"model": OWN})


async def _long_with_any(attacker: Attacker) -> None:
    """Ask for a long answer with any adapter but the other tenant's."""
    name = f"a{attacker.chance.randrange(1, NUM_ADAPTERS)}"
    await attacker.post("/v1/completions", SHORT | {"model": name, "max_tokens": 1500})


async def _long_with_one(attacker: Attacker) -> None:
    await attacker.post("/v1/completions", SHORT | {"model": OWN, "max_tokens": 1500})


ADAPTERS = Attack(
    "adapters",
    _any_adapter,
    at_once=NUM_SWAPPING,
    control=_one_adapter,
    control_at_once=NUM_SWAPPING,
    makes_flags=_with_adapters,
)
HELD = Attack(
    "held-adapters",
    _long_with_any,
    at_once=NUM_HOLDING,
    control=_long_with_one,
    control_at_once=MAX_LORAS,
    flags=("--scheduling-policy", "fair", "--num-kv-blocks", "4096"),
    makes_flags=_with_adapters,
)
ATTACKS = [ADAPTERS, HELD]
SCENARIOS = [
    Scenario("modest-adapter", modest_beside(HELD, "/v1/completions", SHORT | {"model": OWN}, SERVED_WITHIN_S))
]
