"""Limit the processor time that grammars cost a request, and count that of each tenant. Pure: times are arguments."""

from __future__ import annotations

from dataclasses import dataclass

# A request's answers together may take this much processor time at once, and this much more for each of their tokens.
# A schema's mask takes 0.01 to 0.4 ms, and a bounded repetition over 128,000 tokens 2 ms.
BURST_S = 1.0
TOKEN_S = 0.002
HALF_LIFE_S = 1.0  # of the processor time counted for a tenant


@dataclass(slots=True)
class GroupBudget:
    """The processor time of a request's answers: a burst, and a little for each token."""

    used_s: float = 0.0
    num_tokens: int = 0

    @property
    def limit_s(self) -> float:
        """What the tokens so far allow."""
        return BURST_S + TOKEN_S * self.num_tokens

    @property
    def refusal(self) -> str:
        """Why there is no further mask; empty while the budget holds."""
        if self.used_s <= self.limit_s:
            return ""
        return (
            f"its masks took {self.used_s:.2f} s of processor time for {self.num_tokens} tokens; the limit is "
            f"{BURST_S:g} s and {1e3 * TOKEN_S:g} ms for each token: make the grammar less ambiguous, or ask for fewer "
            "answers"
        )


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
