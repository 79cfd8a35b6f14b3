"""Learn from measured steps how long a step with a given amount of work takes.

    t = step + prefill_token * (prompt tokens) + prefill_pair * (pairs of a prompt token and one that it attends to)
             + decode_token * (decodes) + kv_token * (tokens whose keys and values the decodes read)
             + resume, if the worker was idle before
             + beyond_16 * (tokens of the step beyond the first 16), and the same for 64 and 256

This is linear in the work. The last three terms let a token of a large step cost more than one of a small step
(`step_size.py`). The times have the least weighted squares of the errors relative to a step's time, and none is
negative. Old steps count less and less. A step
that took much longer than expected counts little (Huber, "Robust Estimation of a Location Parameter", 1964), because it
says more about the machine than about its work. What such steps add on average is in `slowdown`.

Neighbouring steps may be slow or fast together: something else uses the machine for a while, or the times do not fit
this kind of work. So the mean error of the last steps is expected of the next ones, and less of those further ahead.
How much is expected depends on how far the errors of neighbours agree: nothing if they do not (Wiener, "Extrapolation,
Interpolation, and Smoothing of Stationary Time Series", 1949).
"""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
from msgspec import Struct

from servekit.latency.step_size import BREAKPOINTS, tokens_beyond_breakpoints
from servekit.protocol.messages import StepPlan

TERMS = (
    *("step", "prefill_token", "prefill_pair", "decode_token", "kv_token", "resume"),
    *(f"beyond_{point}" for point in BREAKPOINTS),
)
IDLE_S = 5e-3  # a shorter pause between two steps does not show


class StepWork(Struct, frozen=True, gc=False):
    """What a step computes, in the order of TERMS. Each step has the first of them once."""

    num_prefill_tokens: int
    num_prefill_pairs: float  # pairs of a prompt token and a token that it attends to
    num_decode_tokens: int  # one for each sequence, and one more for each draft
    num_kv_tokens: int  # tokens that decodes attend to
    num_resumes: int = 0  # 1 if the worker was idle before: its threads slept, and its caches have other data

    @staticmethod
    def of(plan: StepPlan, idle_s: float = 0.0) -> StepWork:
        """Count the work of a plan, before which the worker was idle for `idle_s`. Takes 0.1 µs for each chunk."""
        num_prefill = num_decode = num_kv = 0
        num_pairs = 0.0
        for chunk in plan.chunks:
            num_tokens = chunk.num_tokens
            if chunk.samples and num_tokens == 1 + chunk.num_drafts:
                num_decode += num_tokens
                num_kv += chunk.start + num_tokens
            else:
                num_prefill += num_tokens
                num_pairs += num_tokens * (chunk.start + 0.5 * num_tokens)
        return StepWork(num_prefill, num_pairs, num_decode, num_kv, int(idle_s >= IDLE_S))

    def amounts(self) -> tuple[float, ...]:
        """Return the amount that each of TERMS is multiplied by."""
        return (
            1.0,
            self.num_prefill_tokens,
            self.num_prefill_pairs,
            self.num_decode_tokens,
            self.num_kv_tokens,
            self.num_resumes,
            *tokens_beyond_breakpoints(self.num_prefill_tokens + self.num_decode_tokens),
        )


class LatencyModel:
    """The fitted times of one worker. It adapts when the worker is replaced by a faster or slower one."""

    DECAY = 0.998  # factor for the weight of a step with each later step: half after 350 steps
    ERROR_DECAY = 0.98  # the same for the mean error, which thus follows a change within some 50 steps
    SLOWDOWN_DECAY = 0.995  # and for the slowdown, so that one delayed step has little effect
    LEVEL_DECAY = 0.8  # and for the mean error of the last steps
    NOISE_SHARE = (1.0 - LEVEL_DECAY) / (1.0 + LEVEL_DECAY)  # variance of such a mean, divided by that of one error
    AGREEMENT_DECAY = 0.998  # and for the correlation of neighbouring steps
    DRIFT_FADES = 0.97  # part of the drift that is left one step later: half after 23 steps
    MIN_SCALE = 0.02  # errors of 2 % are noise on every machine
    HUBER_RATIO = 3.0  # an error larger than this many mean errors gets less weight
    MIN_S = 1e-7  # shortest time of a step, because logarithms are taken
    MAX_RATIO = 5.0  # upper bound of measured time divided by expected time
    RIDGE = 1e-4  # decides between terms that the data cannot separate yet, for the time of each step
    STEPS_PER_SOLUTION = 16  # solving takes some 60 µs

    def __init__(self) -> None:
        self.coefficients_s = (0.0,) * len(TERMS)
        self.num_steps = 0
        self.relative_error = 0.0  # mean of recent steps, absolute: their time to what was expected of the next step
        self.slowdown = 1.0  # mean ratio of recent steps: their time to what the times of TERMS say
        self._fit_error = 0.0  # like relative_error, without the drift
        self._level = 0.0  # mean error of the last steps: the logarithm of their time to what times and slowdown say
        self._last_error = 0.0  # of the newest step
        self._squares = self._neighbours = 0.0  # sums of squared errors, and of those of a step times the next one
        self._weight = 1.0  # of the next step: growing, in place of all sums that decay
        self._products = [[0.0] * len(TERMS) for _ in TERMS]  # of amounts with amounts
        self._wanted = [0.0] * len(TERMS)  # products of amounts with seconds

    @property
    def is_known(self) -> bool:
        """Whether there was a step."""
        return self.num_steps > 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`. Takes about 6 µs, and each sixteenth time ten times as long."""
        seconds = max(seconds, self.MIN_S)
        amounts = work.amounts()
        fitted_s = self._expected_s(amounts)
        mean_s = self.slowdown * fitted_s
        # The first errors are those of a model without data.
        share = max(1.0 - self.ERROR_DECAY, 1.0 / (1.0 + self.num_steps))
        error = min(abs(seconds / (mean_s * exp(self.drift) or seconds) - 1.0), self.MAX_RATIO - 1.0)
        self._follow(mean_s, seconds)
        self.relative_error += share * (error - self.relative_error)
        expected_s = fitted_s or seconds
        ratio = min(seconds / expected_s, self.MAX_RATIO)
        error = abs(ratio - 1.0)
        limit = self.HUBER_RATIO * max(self._fit_error, self.MIN_SCALE)
        self._add(amounts, expected_s, seconds, min(1.0, limit / error) if error else 1.0)
        self._fit_error += share * (error - self._fit_error)
        self.num_steps += 1
        if self.num_steps > self.STEPS_PER_SOLUTION:  # before that, the times of TERMS themselves are wrong
            share = max(1.0 - self.SLOWDOWN_DECAY, 1.0 / (1.0 + self.num_steps - self.STEPS_PER_SOLUTION))
            self.slowdown += share * (ratio - self.slowdown)
        if self.num_steps < self.STEPS_PER_SOLUTION or self.num_steps % self.STEPS_PER_SOLUTION == 0:
            self._solve()

    def follow(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds` how fast the worker is now.

        The times of kinds of work do not change.
        """
        self._follow(self.seconds_of(work), max(seconds, self.MIN_S))

    def _follow(self, mean_s: float, seconds: float) -> None:
        expected_s = mean_s or seconds
        # One delayed step must have little effect. Many in a row make the mean error large, and with it the limit.
        limit = self.HUBER_RATIO * max(self.relative_error, self.MIN_SCALE)
        if self.num_steps > self.STEPS_PER_SOLUTION:
            error = min(max(log(seconds / expected_s), self._level - limit), self._level + limit)
            self._level += (1.0 - self.LEVEL_DECAY) * (error - self._level)
            self._squares = self.AGREEMENT_DECAY * self._squares + error * error
            self._neighbours = self.AGREEMENT_DECAY * self._neighbours + error * self._last_error
            self._last_error = error

    @property
    def drift(self) -> float:
        """What is expected of the next step: the logarithm of its time to what the times and the slowdown say.

        The best linear estimate: the mean error of the last steps times the part of its variance that is not noise.
        """
        if self._neighbours <= 0.0:
            return 0.0
        agreement = min(1.0, self._neighbours / self._squares)
        return self._level * agreement / (agreement + self.NOISE_SHARE * (1.0 - agreement))

    def info(self) -> dict[str, Any]:
        """Return what /info says of it: each of TERMS in microseconds, and how good they are."""
        times = {f"{term}_us": 1e6 * time_s for term, time_s in zip(TERMS, self.coefficients_s, strict=True)}
        quality = {"slowdown": self.slowdown, "relative_error": self.relative_error, "num_steps": self.num_steps}
        return {name: float(f"{value:.4g}") for name, value in {**times, **quality}.items()}

    def seconds_of(self, work: StepWork, num_steps_ahead: int | None = None) -> float:
        """Return how long a step with this work is expected to take; 0 until one was observed.

        With 0 it is the next step that is done, with 1 the one after it; without a number, some step in the future.
        """
        mean_s = self.slowdown * self._expected_s(work.amounts())
        if num_steps_ahead is None:
            return mean_s
        return mean_s * exp(self.drift * self.DRIFT_FADES**num_steps_ahead)

    def _expected_s(self, amounts: tuple[float, ...]) -> float:
        return sum([amount * time_s for amount, time_s in zip(amounts, self.coefficients_s, strict=True)])

    def _add(self, amounts: tuple[float, ...], expected_s: float, seconds: float, huber_weight: float) -> None:
        # Errors are relative to the expected time: the result of two steps may come at once, so that one of them seems
        # to have taken no time.
        weight = self._weight * huber_weight / max(expected_s, seconds / self.MAX_RATIO) ** 2
        others = [(index, amount) for index, amount in enumerate(amounts) if amount]
        for row, amount in others:
            weighted, products = weight * amount, self._products[row]
            self._wanted[row] += weighted * seconds
            for column, other in others:
                products[column] += weighted * other
        self._weight /= self.DECAY
        if self._weight > 100.0:
            scale, self._weight = 1.0 / self._weight, 1.0
            self._wanted = [scale * each for each in self._wanted]
            self._products = [[scale * each for each in row] for row in self._products]

    def _solve(self) -> None:
        """Solve the normal equations. The most negative time is left out, then the next one."""
        products, wanted = np.array(self._products), np.array(self._wanted)
        scales = np.sqrt(np.maximum(np.diag(products), 1e-300))
        products /= np.outer(scales, scales)
        wanted /= scales
        products[np.arange(1, len(TERMS)), np.arange(1, len(TERMS))] += self.RIDGE
        kept = [index for index in range(len(TERMS)) if self._products[index][index]]
        while True:  # ends: a single time is never negative, because all work and all durations are positive
            solution = np.linalg.solve(products[np.ix_(kept, kept)], wanted[kept])
            if (solution >= 0.0).all():
                break
            del kept[int(solution.argmin())]
        times = np.zeros(len(TERMS))
        times[kept] = solution / scales[kept]
        self.coefficients_s = tuple(times.tolist())
