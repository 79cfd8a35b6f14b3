"""Service-level objectives: limits for each request, and objectives of a whole run.

`ttft:200ms,tpot:30ms,e2e:5s` are limits. A request is good if it was answered and met all of them; goodput is the rate
of good requests (Zhong et al., "DistServe", OSDI 2024, section 2). `ttft_p99:500ms` is a demand: an objective of all
requests together.

- `ttft`: from the intended start to the first token.
- `e2e`: from the intended start to the end.
- `tpot`: the mean time per output token after the first ones.
- `itl`: as a limit, the longest pause in the request's answer; as a demand, a statistic of the times between tokens.

An objective of something that was not measured is missed: whole answers have neither a first token nor times between
tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.analysis.statistics import Floats, percentile_with_losses
from loadtest.errors import LoadTestError

NAMES = ("ttft", "tpot", "itl", "e2e")
BETWEEN_TOKENS = ("tpot", "itl")
UNITS_S = {"ms": 0.001, "s": 1.0}
PART = re.compile(r"([a-z0-9]+)(?:_(mean|max|p[0-9]+(?:\.[0-9]+)?))?:([0-9]+(?:\.[0-9]+)?)(ms|s)")
EXAMPLE = "ttft:200ms,tpot:30ms,e2e:5s,ttft_p99:500ms"


class Limit(Struct, frozen=True):
    """An objective for each request."""

    name: str
    limit_s: float


class Demand(Struct, frozen=True):
    """An objective for one figure of the whole run."""

    name: str
    statistic: str  # mean, max, p50, p99, p99.9
    limit_s: float


class Objectives(Struct, frozen=True):
    """The objectives, as they were written and as they were parsed."""

    text: str
    limits: tuple[Limit, ...]
    demands: tuple[Demand, ...]


class Verdict(Struct, frozen=True):
    """Whether a demand was met. A value of None could not be measured, or is infinite: the demand is missed."""

    demand: Demand
    value_s: float | None
    is_met: bool


class Goodput(Struct, frozen=True):
    """How many requests met all limits."""

    num_good: int
    num: int  # that should have been served: failed ones included, those that were stopped with the run excluded
    share: float
    requests_per_s: float  # good requests
    num_missed: dict[str, int]  # by limit, of answered requests; a request may miss several
    num_failed: int


def parse(text: str) -> Objectives:
    """Parse `ttft:200ms,tpot:30ms,e2e:5s,itl:50ms,ttft_p99:500ms`. Raises LoadTestError."""
    limits, demands = [], []
    seen = set()
    for part in text.split(","):
        found = PART.fullmatch(part.strip())
        if found is None:
            raise LoadTestError(
                f"--slo: {part.strip()!r} is not an objective; write, for example, {EXAMPLE}, in ms or s"
            )
        name, statistic, amount, unit = found.groups()
        if name not in NAMES:
            raise LoadTestError(f"--slo: unknown name {name!r}; choose from {', '.join(NAMES)}")
        if (name, statistic) in seen:
            raise LoadTestError(f"--slo: {part.strip()!r} is a second limit for the same figure; keep one")
        seen.add((name, statistic))
        limit_s = float(amount) * UNITS_S[unit]
        if statistic is None:
            limits.append(Limit(name, limit_s))
        else:
            demands.append(Demand(name, _statistic(statistic), limit_s))
    return Objectives(text, tuple(limits), tuple(demands))


def _statistic(text: str) -> str:
    """Also accepts `p999` for p99.9."""
    if not text.startswith("p"):
        return text
    digits = text[1:]
    if "." not in digits and len(digits) > 2 and digits.startswith("9"):  # p101 is a mistake and not p10.1
        digits = f"{digits[:2]}.{digits[2:]}"
    if float(digits) > 100.0:
        raise LoadTestError(f"--slo: {text} is not a percentile from p0 to p100")
    return f"p{digits}"


def within(limit: Limit, values: Mapping[str, Floats]) -> NDArray[np.bool_]:
    """Return which requests kept the limit; `values` holds what each request took in seconds, by name.

    A request without a second token has no time between tokens (NaN). It keeps a limit on those times if any other
    request has them; if no request has them, all miss the limit, as a demand would be missed. Every request needs a
    first token and an end: without one it misses.
    """
    own = values[limit.name]
    is_within: NDArray[np.bool_] = own <= limit.limit_s
    if limit.name in BETWEEN_TOKENS and is_measured(limit, values):
        is_within |= np.isnan(own)
    return is_within


def is_measured(limit: Limit, values: Mapping[str, Floats]) -> bool:
    """Return whether any request has a value for the limit."""
    return not np.isnan(values[limit.name]).all()


def good_requests(
    objectives: Objectives, values: Mapping[str, Floats], is_answered: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return which requests were answered and met all limits; `values` as for `within`."""
    is_good = is_answered.copy()
    for limit in objectives.limits:
        is_good &= within(limit, values)
    return is_good


def good(
    objectives: Objectives,
    values: Mapping[str, Floats],
    is_answered: NDArray[np.bool_],
    is_to_be_served: NDArray[np.bool_],
    span_s: float,
) -> Goodput:
    """Count the requests that met all limits. All arrays have one element for each request."""
    is_served = is_answered & is_to_be_served
    num = int(is_to_be_served.sum())
    num_good = int((good_requests(objectives, values, is_answered) & is_to_be_served).sum())
    return Goodput(
        num_good=num_good,
        num=num,
        share=num_good / num if num else 0.0,
        requests_per_s=num_good / span_s if span_s > 0.0 else 0.0,
        num_missed={limit.name: int((is_served & ~within(limit, values)).sum()) for limit in objectives.limits},
        num_failed=int((is_to_be_served & ~is_answered).sum()),
    )


def check_demands(
    objectives: Objectives, values: Mapping[str, Floats], num_answered: int, num_failed: int
) -> list[Verdict]:
    """Check each demand; `values` holds all measured values by name, in seconds, NaN where nothing was measured.

    A failed request counts as an infinite value. For times between tokens it counts as as many infinite values as an
    answered request has on average, if that is more than one: among 200 gaps from each answer, a single one would not
    show. Otherwise a server could improve its percentiles by refusing the requests that it would answer late.
    """
    return [_check_demand(demand, values[demand.name], num_answered, num_failed) for demand in objectives.demands]


def _check_demand(demand: Demand, values: Floats, num_answered: int, num_failed: int) -> Verdict:
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
