"""How the next token is chosen, and when to stop: one frozen value per sequence."""

from __future__ import annotations

from msgspec import Struct


class SamplingParams(Struct, frozen=True, kw_only=True):
    """Sampling parameters with every default already resolved.

    The wire's optional fields live in `schemas`; by the time a value reaches the workload manager nothing is
    left to guess. In particular `seed` is always set, also when the client gave none: randomness is a function
    of (seed, position), so a preempted sequence that is computed again samples the same tokens again.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
