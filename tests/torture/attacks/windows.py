"""Compare a bystander's latency under attack with its latency without, in alternating windows of one run."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from tests.support.server_process import ServerProcess
from tests.torture.attacks.attacker import Attack, AttackerProcess
from tests.torture.attacks.bystander import NUM_STREAMS, Bystander, Window
from tests.torture.attacks.claims import Claim, counts
from tests.torture.attacks.tenants import GIVES_UP_AT_MIB, MAX_MORE_MIB, MEMORY_INTERVAL_S, memory_mib
from tests.torture.report import percentile

MAX_RATIO = 2.0
AT_REST_WITHIN_S = 60


class Figure(Struct, frozen=True):
    """A figure of each window: the name, the values of which it is a percentile, and how long it may be in any case."""

    name: str
    values_s: Callable[[Window], list[float]]
    share: float = 0.5
    allowed_s: float | None = None  # None: nothing is demanded

    def median_s(self, windows: list[Window]) -> float | None:
        """Return the median of the windows; None if no window has a value."""
        found = [percentile(values_s, self.share) for values_s in map(self.values_s, windows) if values_s]
        return statistics.median(found) if found else None


GAP = Figure("p99 between tokens", lambda window: window.gaps_s, 0.99, allowed_s=0.0)
CONSTRAINED_GAP = Figure(
    "p99 between constrained tokens", lambda window: window.constrained_gaps_s, 0.99, allowed_s=0.0
)
FIGURES = (
    GAP,
    CONSTRAINED_GAP,
    Figure("first token", lambda window: window.first_tokens_s),
    Figure("p99 of first tokens", lambda window: window.first_tokens_s, 0.99),
    Figure("chat", lambda window: window.chats_s, allowed_s=1.0),
    Figure("new grammar", lambda window: window.grammars_s, allowed_s=1.0),
    Figure("/health", lambda window: window.healths_s),
    Figure("longest /health", lambda window: window.healths_s, 1.0),
)


class Memory(Struct):
    """The resident memory of the server's processes: before the first attack, and the most since then."""

    before: dict[str, float] = {}
    most: dict[str, float] = {}

    @property
    def more_mib(self) -> float:
        return max(0.0, sum(self.most.values()) - sum(self.before.values())) if self.before else 0.0


def beside_bystander(
    attack: Attack, seconds: float, seed: int, num_rounds: int = 3, control_s: float | None = None
) -> list[Claim]:
    """Attack a server in `num_rounds` windows of `seconds`, each after a control window, and return the claims.

    The control window, with which only latencies are compared, has as many seconds, or `control_s`.
    """
    control_s = seconds if control_s is None else control_s
    with attack.serving() as server:
        claims = asyncio.run(_compare(server, attack, seconds, control_s, seed, num_rounds))
        num_tracebacks = server.log.read_text().count("Traceback")
    return [*claims, Claim("no traceback", f"{num_tracebacks} tracebacks", num_tracebacks == 0)]


async def _compare(
    server: ServerProcess, attack: Attack, seconds: float, control_s: float, seed: int, num_rounds: int
) -> list[Claim]:
    calm: list[Window] = []
    loud: list[Window] = []
    statuses: Counter[str] = Counter()
    async with Bystander(server.port) as bystander, AttackerProcess(attack.name, server.port, seed) as attacker:
        await asyncio.sleep(min(3.0, control_s))  # the first requests are slower
        memory = Memory()
        watch = asyncio.create_task(_watch(server, memory))
        for _ in range(num_rounds):
            bystander.begin_window()
            attacker.begin("control")
            await asyncio.sleep(control_s)
            calm.append(bystander.begin_window())
            memory.before = memory.before or memory_mib(server)
            await attacker.rest()
            await _until_at_rest(server)
            bystander.begin_window()
            attacker.begin("attack")
            await asyncio.wait([watch], timeout=seconds)
            loud.append(bystander.begin_window())
            statuses += await attacker.rest()
            await _until_at_rest(server)
            if watch.done():
                break
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    return [*_claims(calm, loud), _memory_claim(memory), Claim("", f"the attacker's answers: {counts(statuses)}")]


async def _watch(server: ServerProcess, memory: Memory) -> None:
    """Follow the memory; return when it has grown so much that the attack must end."""
    while memory.more_mib < GIVES_UP_AT_MIB:
        await asyncio.sleep(MEMORY_INTERVAL_S)
        now = memory_mib(server)
        if sum(now.values()) > sum(memory.most.values()):
            memory.most = now


async def _until_at_rest(server: ServerProcess) -> None:
    """Wait until only the bystander's requests are left, for a limited time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(AT_REST_WITHIN_S):
            await asyncio.sleep(0.5)
            while await asyncio.to_thread(server.metric, "servekit_num_requests_running") > NUM_STREAMS + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


def _claims(calm: list[Window], loud: list[Window]) -> list[Claim]:
    others = Counter(other for window in loud for other in window.others)
    num_right = sum(window.num_right for window in loud)
    answered = f"{num_right:,} of {num_right + others.total():,} right" + (f" ({counts(others)})" if others else "")
    longest_s = max((gap_s for window in loud for gap_s in [*window.gaps_s, *window.constrained_gaps_s]), default=None)
    return [
        *(_compared(figure, figure.median_s(calm), figure.median_s(loud)) for figure in FIGURES),
        Claim("", f"longest pause between tokens {_ms(longest_s)}"),
        Claim("all answers right", answered, not others),
    ]


def _compared(figure: Figure, calm_s: float | None, loud_s: float | None) -> Claim:
    ratio = f"{loud_s / calm_s:.1f}x, " if calm_s and loud_s is not None and figure in (GAP, CONSTRAINED_GAP) else ""
    measured = f"{figure.name} {ratio}{_ms(calm_s)} -> {_ms(loud_s)}"
    if figure.allowed_s is None:
        return Claim("", measured)
    is_kept = calm_s is not None and loud_s is not None and loud_s <= max(figure.allowed_s, MAX_RATIO * calm_s)
    in_any_case = f"{figure.allowed_s:g} s or " if figure.allowed_s else ""
    return Claim(f"{figure.name} <= {in_any_case}{MAX_RATIO:g}x", measured, is_kept, is_timed=True)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _memory_claim(memory: Memory) -> Claim:
    each = ", ".join(f"{name} {memory.most[name] - memory.before[name]:+,.0f}" for name in memory.before)
    is_kept = memory.more_mib <= MAX_MORE_MIB
    return Claim(f"memory <= +{MAX_MORE_MIB:,} MiB", f"{memory.more_mib:+,.0f} MiB ({each})", is_kept)
