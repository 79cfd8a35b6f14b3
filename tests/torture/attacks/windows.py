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
from tests.torture.attacks.tenants import GIVES_UP_AT_MIB, MAX_MORE_MIB, MEMORY_INTERVAL_S, memory_mib, serving_tenants
from tests.torture.report import percentile

MAX_RATIO = 2.0
AT_REST_WITHIN_S = 60
# What else is measured in each window: a name, the figure in seconds, and what is allowed if twice as much is less.
FIGURES: list[tuple[str, Callable[[Window], float], float | None]] = [
    ("first token", lambda window: percentile(window.first_tokens_s, 0.5), None),
    ("chat", lambda window: percentile(window.chats_s, 0.5), 1.0),
    ("new grammar", lambda window: percentile(window.grammars_s, 0.5), 1.0),
    ("/health", lambda window: percentile(window.healths_s, 0.5), None),
    ("longest /health", lambda window: max(window.healths_s, default=0.0), None),
]


class Memory(Struct):
    """The resident memory of the server's processes: before the first attack, and the most since then."""

    before: dict[str, float] = {}
    most: dict[str, float] = {}

    @property
    def more_mib(self) -> float:
        return max(0.0, sum(self.most.values()) - sum(self.before.values())) if self.before else 0.0


def beside_bystander(attack: Attack, seconds: float, seed: int, num_rounds: int = 3) -> list[Claim]:
    """Attack a server in `num_rounds` windows of `seconds`, each after a control window, and return the claims."""
    with serving_tenants(attack.name, *attack.flags, limits=attack.limits) as server:
        claims = asyncio.run(_compare(server, attack, seconds, seed, num_rounds))
        num_tracebacks = server.log.read_text().count("Traceback")
    return [*claims, Claim("no traceback", f"{num_tracebacks} tracebacks", num_tracebacks == 0)]


async def _compare(server: ServerProcess, attack: Attack, seconds: float, seed: int, num_rounds: int) -> list[Claim]:
    calm: list[Window] = []
    loud: list[Window] = []
    statuses: Counter[str] = Counter()
    async with Bystander(server.port) as bystander, AttackerProcess(attack.name, server.port, seed) as attacker:
        await asyncio.sleep(min(3.0, seconds))  # the first requests are slower
        memory = Memory()
        watch = asyncio.create_task(_watch(server, memory))
        for _ in range(num_rounds):
            bystander.begin_window()
            attacker.begin("control")
            await asyncio.sleep(seconds)
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
    def medians_s(figure: Callable[[Window], float]) -> tuple[float, float]:
        before_s, after_s = (statistics.median(map(figure, windows)) for windows in (calm, loud))
        return before_s, after_s

    before_s, after_s = medians_s(lambda window: percentile(window.gaps_s, 0.99))
    longest_s = max(max(window.gaps_s, default=0.0) for window in loud)
    is_kept = after_s <= MAX_RATIO * before_s and all(window.gaps_s for window in loud)
    ratio = (
        f"{after_s / before_s if before_s else 0:.1f}x ({_ms(before_s)} -> {_ms(after_s)}, longest {_ms(longest_s)})"
    )
    others = Counter(other for window in loud for other in window.others)
    num_right = sum(window.num_right for window in loud)
    answered = f"{num_right:,} of {num_right + others.total():,}" + (f" ({counts(others)})" if others else "")
    figures: list[Claim] = []
    for name, figure, allowed_s in FIGURES:
        calm_s, loud_s = medians_s(figure)
        is_within = None if allowed_s is None else loud_s <= max(allowed_s, MAX_RATIO * calm_s)
        demanded = f"{name} <= {allowed_s:g} s or {MAX_RATIO:g}x" if allowed_s else ""
        figures.append(Claim(demanded, f"{name} {_ms(calm_s)} -> {_ms(loud_s)}", is_within, is_timed=True))
    return [
        Claim(f"p99 between tokens <= {MAX_RATIO:g}x", ratio, is_kept, is_timed=True),
        Claim("all other answers right", answered, not others),
        *figures,
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _memory_claim(memory: Memory) -> Claim:
    each = ", ".join(f"{name} {memory.most[name] - memory.before[name]:+,.0f}" for name in memory.before)
    is_kept = memory.more_mib <= MAX_MORE_MIB
    return Claim(f"memory <= +{MAX_MORE_MIB:,} MiB", f"{memory.more_mib:+,.0f} MiB ({each})", is_kept)
