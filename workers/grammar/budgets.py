"""Limit the processor time that grammars of a request may take, and count that of each tenant.

Pure: times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

# A request's answers together may take this much processor time at once, and this much more for each of their tokens.
# A schema's mask takes 0.01 to 0.4 ms, and a bounded repetition over 128,000 tokens 2 ms.
BURST_S = 1.0
TOKEN_S = 0.002
HALF_LIFE_S = 1.0  # of the processor time counted for a tenant
# A piece of work is not interrupted, so masks of others wait until it ends. A tenant with a longer piece of work is
# slow for a time. A schema of 100 nested properties takes 5 ms to compile.
MAX_PIECE_S = 0.01
SLOW_FOR_S = 60.0
MAX_SKIPPED = 32  # steps that do not wait for a tenant's masks


@dataclass(slots=True)
class GroupBudget:
    """The processor time of a request's answers: a burst, and a little for each token.

    The time of masks after drafts is counted separately, so that drafts never end a request.
    """

    used_s: float = 0.0
    drafts_s: float = 0.0
    num_tokens: int = 0

    @property
    def limit_s(self) -> float:
        """The time that is allowed for the tokens so far."""
        return BURST_S + TOKEN_S * self.num_tokens

    @property
    def allows_drafts(self) -> bool:
        """Whether there is time left for the masks after drafts."""
        return self.used_s + self.drafts_s < self.limit_s

    @property
    def refusal(self) -> str:
        """Why no more masks are computed; empty while the budget lasts."""
        if self.used_s <= self.limit_s:
            return ""
        return (
            f"its masks took {self.used_s:.2f} s of processor time for {self.num_tokens} tokens; the limit is "
            f"{BURST_S:g} s and {1e3 * TOKEN_S:g} ms for each token: make the grammar less ambiguous, or ask for fewer "
            "answers"
        )


class SlowTenants:
    """The tenants whose grammars recently took too long. The second mask process follows their new answers."""

    def __init__(self) -> None:
        self._slow_until_s: dict[str, float] = {}

    def add(self, tenant: str, now_s: float) -> None:
        """Count a tenant as slow for a time."""
        self._slow_until_s = {each: until_s for each, until_s in self._slow_until_s.items() if until_s > now_s}
        self._slow_until_s[tenant] = now_s + SLOW_FOR_S

    def is_slow(self, tenant: str, now_s: float) -> bool:
        """Return whether a piece of work for the tenant took too long in the last SLOW_FOR_S seconds."""
        return now_s < self._slow_until_s.get(tenant, now_s)


class Lateness:
    """Decides for which tenants' masks a step waits.

    After waits that ended without a mask, 1, 2, 4, … steps do not wait.
    """

    def __init__(self) -> None:
        self._skipping: dict[str, tuple[int, int]] = {}  # for late tenants: steps still to skip, and skipped in all

    def is_awaited(self, tenant: str) -> bool:
        """Return whether this step waits for the tenant's masks. Call it once for each step."""
        num_left, num_skipped = self._skipping.get(tenant, (0, 0))
        if num_left:
            self._skipping[tenant] = num_left - 1, num_skipped
        return not num_left

    def record(self, tenant: str, is_late: bool) -> None:
        """Record how a wait for the tenant's masks ended."""
        if is_late:
            _, num_skipped = self._skipping.get(tenant, (0, 0))
            num_skipped = min(MAX_SKIPPED, 2 * num_skipped or 1)
            self._skipping[tenant] = num_skipped, num_skipped
        else:
            self._skipping.pop(tenant, None)


class TenantUsage:
    """The processor time that each tenant has used lately. The tenant that has used least goes first."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._decayed_s = 0.0  # when all values were last halved

    def charge(self, tenant: str, used_s: float, now_s: float) -> None:
        """Add processor time to a tenant's. After each half-life, all are halved, and small ones are removed."""
        if now_s - self._decayed_s >= HALF_LIFE_S:
            self._decayed_s = now_s
            self._used_s = {each: used / 2 for each, used in self._used_s.items() if used > 1e-4}
        self._used_s[tenant] = self._used_s.get(tenant, 0.0) + used_s

    def used_s(self, tenant: str) -> float:
        """The processor time that the tenant has used lately."""
        return self._used_s.get(tenant, 0.0)
