"""Define the load of a planned service, and its latency limits."""

from __future__ import annotations

import math
import random

from msgspec import Struct

from servekit.errors import ConfigError
from servekit.laboratory.workload import LabRequest, Workload

LENGTH_SPREAD = 0.6  # of lengths, as the standard deviation of their logarithm
SLO_SHARE = 0.99  # of all requests must be within the limits
_UNITS = {"ms": 1e-3, "s": 1.0}


class Demand(Struct, frozen=True, kw_only=True):
    """Requests with random arrivals and lengths."""

    prompt_tokens: int = 1000  # mean
    output_tokens: int = 200  # mean
    max_length: int = 8192  # of prompt and answer together
    num_requests: int  # of one simulated run
    lengths: tuple[tuple[int, int], ...] = ()  # of prompts and answers that were recorded, to draw from


class ServiceLevel(Struct, frozen=True, kw_only=True):
    """Limits for a request: TTFT, and TPOT, the mean time between two of its tokens."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05


def parse_service_level(text: str) -> ServiceLevel:
    """Parse `ttft:500ms,tpot:50ms`. Raises ConfigError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = part.strip().partition(":")
        unit = "ms" if limit.endswith("ms") else "s"
        number = limit.removesuffix(unit)
        if name not in ("ttft", "tpot") or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
            raise ConfigError(f"--slo {text}: {part!r} is not like ttft:500ms or tpot:0.05s")
        values[f"{name}_s"] = float(number) * _UNITS[unit]
    return ServiceLevel(**values)


def make_requests(demand: Demand, rate: float, seed: int) -> Workload:
    """Make requests of a Poisson process with `rate` arrivals per second, and log-normal or recorded lengths."""
    rng = random.Random(seed)
    requests, at_s = [], 0.0
    for number in range(demand.num_requests):
        if demand.lengths:
            num_prompt, num_output = rng.choice(demand.lengths)
        else:
            num_output, num_prompt = _length(rng, demand.output_tokens), _length(rng, demand.prompt_tokens)
        num_output = min(num_output, demand.max_length - 1)
        num_prompt = min(num_prompt, demand.max_length - num_output)
        # No two prompts begin alike: what a prefix cache saves depends on the service, and is not assumed.
        requests.append(LabRequest(at_s, (number + 1, *(0,) * (num_prompt - 1)), num_output))
        at_s += rng.expovariate(rate)
    return Workload("plan", tuple(requests))


def _length(rng: random.Random, mean: int) -> int:
    """A log-normal length with this mean."""
    median = mean / math.exp(LENGTH_SPREAD**2 / 2)
    return max(1, round(median * rng.lognormvariate(0.0, LENGTH_SPREAD)))
