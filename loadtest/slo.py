"""What a service promises (service-level objectives): limits for each request, and demands upon a whole run.

`ttft:200ms,tpot:30ms,e2e:5s` are limits: a request is good if it was answered and met all of them, and goodput is how
many were (Zhong et al., "DistServe", OSDI 2024, section 2). `ttft_p99:500ms` is a demand: of all requests together.

- `ttft`: from the intended start to the first token.
- `e2e`: from the intended start to the end.
- `tpot`: the mean time per output token after the first ones.
- `itl`: as a limit, the longest pause that the request's reader saw; as a demand, of the times between tokens.

What nothing was measured of is missed: whole answers have neither a first token nor times between tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.errors import LoadTestError
from loadtest.statistics import Floats, percentile_with_losses

NAMES = ("ttft", "tpot", "itl", "e2e")
BETWEEN_TOKENS = ("tpot", "itl")
UNITS_S = {"ms": 0.001, "s": 1.0}
PART = re.compile(r"([a-z0-9]+)(?:_(mean|max|p[0-9]+(?:\.[0-9]+)?))?:([0-9]+(?:\.[0-9]+)?)(ms|s)")
EXAMPLE = "ttft:200ms,tpot:30ms,e2e:5s,ttft_p99:500ms"


class Limit(Struct, frozen=True):
    """For each request."""

    name: str
    limit_s: float


class Demand(Struct, frozen=True):
    """For a figure of the whole run."""

    name: str
    statistic: str  # mean, max, p50, p99, p99.9
    limit_s: float


class Objectives(Struct, frozen=True):
    """What was asked for, as it was written and as it was understood."""

    text: str
    limits: tuple[Limit, ...]
    demands: tuple[Demand, ...]


class Verdict(Struct, frozen=True):
    """What became of a demand. A value of None is one that could not be measured, or that is infinite: missed."""

    demand: Demand
    value_s: float | None
    is_met: bool


class Goodput(Struct, frozen=True):
    """How many requests met all limits."""

    num_good: int
    num: int  # that were to be served: those that failed included, those that the run's end forestalled not
    share: float
    requests_per_s: float  # good ones
    num_missed: dict[str, int]  # by limit, of the requests that were answered; some miss several
    num_failed: int


def parse(text: str) -> Objectives:
    """Read `ttft:200ms,tpot:30ms,e2e:5s,itl:50ms,ttft_p99:500ms`. Raises LoadTestError."""
    limits, demands = [], []
    seen = set()
    for part in text.split(","):
        found = PART.fullmatch(part.strip())
        if found is None:
            raise LoadTestError(f"--slo: cannot read {part.strip()!r}; write it like {EXAMPLE}, in ms or s")
        name, statistic, amount, unit = found.groups()
        if name not in NAMES:
            raise LoadTestError(f"--slo: there is no {name!r}; choose from {', '.join(NAMES)}")
        if (name, statistic) in seen:
            raise LoadTestError(f"--slo: {part.strip()!r} is the second limit for the same figure; keep one")
        seen.add((name, statistic))
        limit_s = float(amount) * UNITS_S[unit]
        if statistic is None:
            limits.append(Limit(name, limit_s))
        else:
            demands.append(Demand(name, _statistic(statistic), limit_s))
    return Objectives(text, tuple(limits), tuple(demands))


def _statistic(text: str) -> str:
    """`p999` is what people write for p99.9."""
    if not text.startswith("p"):
        return text
    digits = text[1:]
    if "." not in digits and len(digits) > 2 and digits.startswith("9"):  # p101 is no p10.1, but a slip
        digits = f"{digits[:2]}.{digits[2:]}"
    if float(digits) > 100.0:
        raise LoadTestError(f"--slo: {text} is no percentile; they go from p0 to p100")
    return f"p{digits}"


def within(limit: Limit, values: Mapping[str, Floats]) -> NDArray[np.bool_]:
    """Which requests kept it; `values` holds by name what each request took, in seconds.

    Who has no such time (NaN), for lack of a second token, keeps a limit upon times between tokens, but only if others
    have any: a limit that nothing was held against is kept by nobody, as a demand is then missed. A first token and an
    end are what everybody waits for: who has none, misses.
    """
    own = values[limit.name]
    is_within: NDArray[np.bool_] = own <= limit.limit_s
    if limit.name in BETWEEN_TOKENS and is_measured(limit, values):
        is_within |= np.isnan(own)
    return is_within


def is_measured(limit: Limit, values: Mapping[str, Floats]) -> bool:
    """Whether any request has what the limit is upon."""
    return not np.isnan(values[limit.name]).all()


def good(
    objectives: Objectives,
    values: Mapping[str, Floats],
    is_answered: NDArray[np.bool_],
    is_to_be_served: NDArray[np.bool_],
    span_s: float,
) -> Goodput:
    """Count who met all limits. All arrays have one element for each request."""
    is_good = is_answered & is_to_be_served
    num_missed = {}
    for limit in objectives.limits:
        is_kept = within(limit, values)
        num_missed[limit.name] = int((is_answered & is_to_be_served & ~is_kept).sum())
        is_good &= is_kept
    num, num_good = int(is_to_be_served.sum()), int(is_good.sum())
    return Goodput(
        num_good=num_good,
        num=num,
        share=num_good / num if num else 0.0,
        requests_per_s=num_good / span_s if span_s > 0.0 else 0.0,
        num_missed=num_missed,
        num_failed=int((is_to_be_served & ~is_answered).sum()),
    )


def judge(objectives: Objectives, values: Mapping[str, Floats], num_answered: int, num_failed: int) -> list[Verdict]:
    """What became of each demand; `values` holds by name all that was measured, in seconds, NaN where nothing was.

    Whoever got no answer has waited for ever: each failed request counts as an infinite value, and as many of them as
    an answered one has on average, if that is more: in a pool of 200 gaps from each answer, one would be lost.
    Otherwise a server could keep its percentiles by refusing whom it would be late for.
    """
    return [_judge(demand, values[demand.name], num_answered, num_failed) for demand in objectives.demands]


def _judge(demand: Demand, values: Floats, num_answered: int, num_failed: int) -> Verdict:
    known = values[~np.isnan(values)]
    if demand.name in BETWEEN_TOKENS:
        num_lost = math.ceil(num_failed * max(1.0, len(known) / max(1, num_answered)))
    else:
        num_lost = num_failed + num_answered - len(known)  # an answer without a first token misses, as in `within`
    if demand.statistic == "mean":
        value_s = float(known.mean()) if len(known) and not num_lost else math.inf
    elif demand.statistic == "max":
        value_s = percentile_with_losses(known, num_lost, 100.0)
    else:
        value_s = percentile_with_losses(known, num_lost, float(demand.statistic[1:]))
    is_known = math.isfinite(value_s)
    return Verdict(demand, value_s if is_known else None, is_known and value_s <= demand.limit_s)
