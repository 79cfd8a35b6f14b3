"""The LoRA adapters of one model: their names, and which of them have requests.

The registry may have any number of adapters. The worker keeps `max_loras` of them in memory, and reads others when a
step needs them. So at most `max_loras` adapters have requests at the same time; a request for another adapter waits
until one of them has no requests. The next free place goes to the tenant whose requests hold fewest of them, and of
these to the one that has waited longest; so a tenant's backlog delays its own requests. Those of one tenant get places
in order of arrival.

A place becomes free only when its answers end, which may take minutes. So some places are kept for other tenants, and a
tenant that already holds one cannot take these: one place for each tenant that has asked for an adapter lately and
holds none, up to half of the places. If there are at least `KEPT_FROM` places, at least one is kept, for a tenant that
has not asked yet.

A request for an adapter that has requests needs no place, so it continues at once, unless one that needs a place has
waited for `OVERTAKEN_S`, and is of the same tenant or of one that holds fewer places: otherwise requests for busy
adapters could make it wait for ever. A tenant that holds no more places than those who wait goes on using its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.config import ServeConfig
from servekit.engine.model_names import ANY_MODEL
from servekit.errors import ConfigError, InvalidRequest, ModelNotFound, QueueFull
from servekit.observability.live_frames import MAX_ADAPTERS_SHOWN, LiveAdapters
from servekit.observability.metrics import AdapterUsage
from servekit.protocol.lora import AdapterLoaded, LoadAdapter, LoraAdapter
from servekit.shared_budget import SharedBudget

log = logging.getLogger("servekit")

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,200}")
MAX_ADAPTERS = 10_000
MAX_PATH_CHARACTERS = 4096
WAIT_TIMEOUT_S = 60.0  # a request waits so long for a place, and is then refused with Retry-After
OVERTAKEN_S = 5.0  # for so long, requests for busy adapters go before one that waits for a place
RETRY_AFTER_S = 5
SEEN_S = 600.0  # for so long after a tenant's last request, a place is kept for it
KEPT_FROM = 4  # with at least so many places, one is always kept, for a tenant that has not asked yet

Ask = Callable[[LoadAdapter], Awaitable[AdapterLoaded]]  # a worker; raises WorkerError


class AdapterUse:
    """An adapter that one request uses."""

    __slots__ = ("_end", "adapter")

    def __init__(self, adapter: LoraAdapter, end: Callable[[], None]) -> None:
        """`end` is called once, by the first `release`."""
        self._end: Callable[[], None] | None = end
        self.adapter = adapter

    def release(self) -> None:
        """End the use. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request that waits for a place for its adapter."""

    adapter: LoraAdapter
    tenant: str
    place: asyncio.Future[AdapterUse]
    since_s: float  # time on the event loop's clock


class AdapterRegistry:
    """Which adapters there are. Everything runs on the event loop's thread."""

    def __init__(self, config: ServeConfig, ask: Ask) -> None:
        """Raises ConfigError for settings that do not go together."""
        self.at_start = adapters_at_start(config)
        self.may_load = config.enable_lora
        self._max_loras, self._ask = config.max_loras, ask
        self._places = SharedBudget(config.max_num_queued_reqs)  # of requests that wait
        self._adapters: dict[str, LoraAdapter] = {}
        self._paths: dict[str, str] = {}  # paths of `_adapters`; requests look up names here
        self._num_uses: Counter[LoraAdapter] = Counter()  # only adapters with requests
        self._used_by: dict[str, Counter[LoraAdapter]] = {}  # the same, by tenant
        self._waiting: dict[str, deque[WaitingRequest]] = {}  # by tenant; only of tenants that wait
        self._seen_s: dict[str, float] = {}  # by tenant: when its last request came, on the event loop's clock
        self._next_number = 1
        self._loading: set[str] = set()
        # Called with the name and the directory of each adapter that is loaded; without a directory, it is unloaded.
        self.on_change: Callable[[str, str | None], None] = lambda _name, _path: None

    @property
    def adapters(self) -> Collection[LoraAdapter]:
        """All adapters, with their fingerprints."""
        return self._adapters.values()

    @property
    def paths(self) -> Mapping[str, str]:
        """The directory of each adapter, by name."""
        return self._paths

    def usage(self) -> AdapterUsage:
        """Return which adapters have requests."""
        in_use: Counter[str] = Counter()
        for adapter, num_uses in self._num_uses.items():  # two may have one name, if it was loaded again
            in_use[adapter.name] += num_uses
        waiting = [each.adapter.name for queue in self._waiting.values() for each in queue]
        return AdapterUsage(len(self._adapters), len(waiting), dict(in_use), tuple(sorted(set(waiting))))

    def live(self) -> LiveAdapters:
        """Return the same for the live view, those with most requests first."""
        usage = self.usage()
        busiest = sorted(usage.in_use.items(), key=lambda each: (-each[1], each[0]))
        return LiveAdapters(usage.num_adapters, usage.num_waiting, busiest[:MAX_ADAPTERS_SHOWN])

    # -- loading ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the adapters of the settings. Raises ConfigError or WorkerError."""
        for name, path in self.at_start.items():
            await self._load(name, path)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter at run time. Raises InvalidRequest or WorkerError."""
        if not self.may_load:
            raise InvalidRequest(
                "adapters are not loaded at run time; start the server with --enable-lora", code="not_supported"
            )
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                f"lora_name = {name[:200]!r}: a name has 1 to 200 letters, digits, '.', '_', ':', '/' and '-'",
                param="lora_name",
            )
        if name in self._adapters or name in self._loading:
            raise InvalidRequest(
                f"the adapter {name!r} is loaded already; unload it first, or choose another name", param="lora_name"
            )
        if len(self._adapters) + len(self._loading) >= MAX_ADAPTERS:
            raise InvalidRequest(f"the server has {MAX_ADAPTERS:,} adapters, which is its limit; unload some")
        if len(path) > MAX_PATH_CHARACTERS or "\0" in path:
            raise InvalidRequest("lora_path is not a path", param="lora_path")
        self._loading.add(name)
        try:
            await self._load(name, path)
        except ConfigError as error:
            raise InvalidRequest(error.message, param="lora_path") from None
        finally:
            self._loading.discard(name)

    async def _load(self, name: str, path: str) -> None:
        adapter = self._make_adapter(name, path)
        answer = await self._ask(LoadAdapter(adapter))
        if answer.refusal:
            raise ConfigError(answer.refusal)
        self._adapters[name] = replace(adapter, fingerprint=answer.fingerprint)
        self._paths[name] = adapter.path
        self.on_change(name, adapter.path)
        log.info("loaded the adapter %s of rank %d from %s", name, answer.rank, adapter.path)

    def _make_adapter(self, name: str, path: str) -> LoraAdapter:
        adapter = LoraAdapter(self._next_number, os.path.abspath(path), name=name)
        self._next_number += 1
        return adapter

    async def unload(self, name: str) -> None:
        """Unload an adapter. Requests that use it continue. Raises ModelNotFound."""
        if self._adapters.pop(name, None) is None:
            raise ModelNotFound(f"there is no adapter {name[:200]!r} to unload", param="lora_name")
        del self._paths[name]
        self.on_change(name, None)
        log.info("unloaded the adapter %s", name)

    # -- use ----------------------------------------------------------------------------------------------------------

    def begin_use(self, name: str, tenant: str) -> AdapterUse | None:
        """Use an adapter if it can be used at once. Raises ModelNotFound."""
        adapter = self._find(name)
        self._seen_s[tenant] = asyncio.get_running_loop().time()
        if adapter in self._num_uses:
            queue = self._waiting.get(tenant)
            may_enter = not (queue and _is_overtaken_long(queue[0])) and (
                self._num_held_with(adapter, tenant) <= self._least_held_by_overtaken()
            )
        else:
            may_enter = not self._waiting and self._may_take_place(tenant)
        return self._use(adapter, tenant) if may_enter else None

    async def wait_for_use(self, name: str, tenant: str) -> AdapterUse:
        """Use an adapter as soon as it has a place. Raises ModelNotFound or QueueFull."""
        if (use := self.begin_use(name, tenant)) is not None:
            return use
        places = self._places
        if not places.has_room(tenant, 1):
            raise QueueFull(
                f"{places.total} requests wait for a place for their adapter{places.describe_share(tenant)}; the limit "
                f"is {places.limit} (max_num_queued_reqs). Please try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        places.take(tenant, 1)
        try:
            return await self._wait_for_place(name, tenant)
        finally:
            places.release(tenant, 1)

    async def _wait_for_place(self, name: str, tenant: str) -> AdapterUse:
        loop = asyncio.get_running_loop()
        place: asyncio.Future[AdapterUse] = loop.create_future()
        entry = WaitingRequest(self._find(name), tenant, place, loop.time())
        self._waiting.setdefault(tenant, deque()).append(entry)
        self._admit()  # others may wait although places are free, because these are kept from them
        try:
            async with pause_tolerant_timeout(WAIT_TIMEOUT_S):
                return await asyncio.shield(place)
        except BaseException as error:
            if place.done() and not place.cancelled():
                place.result().release()
            else:
                place.cancel()
                self._leave(entry)
                self._admit()  # those after it may need no place
            if not isinstance(error, TimeoutError):
                raise
        num_used, num_kept = len(self._num_uses), self._num_kept_from(tenant)
        kept = f", and up to {num_kept} places are kept for other API keys" if num_kept else ""
        raise QueueFull(
            f"{num_used} other adapters have requests; the limit is {self._max_loras} (--max-loras){kept}. No place "
            f"for this one became free within {WAIT_TIMEOUT_S:g} s. Please try again later.",
            retry_after_s=RETRY_AFTER_S,
        )

    def _end_use(self, adapter: LoraAdapter, tenant: str) -> None:
        used = self._used_by[tenant]
        for num_uses in (self._num_uses, used):
            num_uses[adapter] -= 1
            if not num_uses[adapter]:
                del num_uses[adapter]
        if not used:
            del self._used_by[tenant]
        self._admit()

    def _admit(self) -> None:
        """Let waiting requests continue, as far as there are places."""
        self._admit_for_busy_adapters()
        while heads := [queue[0] for tenant, queue in self._waiting.items() if self._may_take_place(tenant)]:
            first = min(heads, key=lambda head: (len(self._used_by.get(head.tenant, ())), head.since_s))
            self._leave(first)
            first.place.set_result(self._use(first.adapter, first.tenant))
            self._admit_for_busy_adapters()

    def _admit_for_busy_adapters(self) -> None:
        """Let waiting requests continue that need no place, as far as they may overtake the others."""
        limit = self._least_held_by_overtaken()
        for tenant, queue in list(self._waiting.items()):
            left: deque[WaitingRequest] = deque()
            for each in queue:
                if (
                    each.adapter in self._num_uses
                    and self._num_held_with(each.adapter, tenant) <= limit
                    and not (left and _is_overtaken_long(left[0]))
                ):
                    each.place.set_result(self._use(each.adapter, tenant))
                else:
                    left.append(each)
            if left:
                self._waiting[tenant] = left
            else:
                del self._waiting[tenant]

    def _leave(self, entry: WaitingRequest) -> None:
        queue = self._waiting[entry.tenant]
        queue.remove(entry)
        if not queue:
            del self._waiting[entry.tenant]

    def _least_held_by_overtaken(self) -> float:
        """The fewest places of a tenant with a request that needs one and was overtaken for long enough, else inf."""
        heads = (queue[0] for queue in self._waiting.values())
        return min(
            (
                len(self._used_by.get(head.tenant, ()))
                for head in heads
                if head.adapter not in self._num_uses and _is_overtaken_long(head)
            ),
            default=math.inf,
        )

    def _num_held_with(self, adapter: LoraAdapter, tenant: str) -> int:
        """How many places a tenant's requests hold, if one of them uses this adapter, too."""
        used = self._used_by.get(tenant, ())
        return len(used) + (adapter not in used)

    def _may_take_place(self, tenant: str) -> bool:
        """Return whether a place is free that is not kept for other tenants."""
        num_free = self._max_loras - len(self._num_uses)
        return num_free > (self._num_kept_from(tenant) if tenant in self._used_by else 0)

    def _num_kept_from(self, tenant: str) -> int:
        """Return how many places a tenant leaves to others. Without API keys there are no others."""
        if tenant == "":
            return 0
        since_s = asyncio.get_running_loop().time() - SEEN_S
        self._seen_s = {name: seen_s for name, seen_s in self._seen_s.items() if seen_s >= since_s}
        num_others = sum(name != tenant and name not in self._used_by for name in self._seen_s)
        num_unseen = int(self._max_loras >= KEPT_FROM)
        return min(max(num_unseen, num_others), self._max_loras // 2)

    def _use(self, adapter: LoraAdapter, tenant: str) -> AdapterUse:
        self._num_uses[adapter] += 1
        self._used_by.setdefault(tenant, Counter())[adapter] += 1
        return AdapterUse(adapter, partial(self._end_use, adapter, tenant))

    def _find(self, name: str) -> LoraAdapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            raise ModelNotFound(f"The adapter {name[:200]!r} is not loaded any more.", param="model")
        return adapter


def _is_overtaken_long(entry: WaitingRequest) -> bool:
    """Whether requests for busy adapters have overtaken this one for long enough."""
    return asyncio.get_running_loop().time() - entry.since_s >= OVERTAKEN_S


def adapters_at_start(config: ServeConfig) -> dict[str, str]:
    """Return the directory of each adapter of the settings, by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for entry in [] if config.lora is None else config.lora.split(","):
        name, _, path = entry.partition("=")
        if not NAME.fullmatch(name) or not path:
            raise ConfigError(
                f"lora = {entry[:300]!r} (--lora) is not accepted: it takes NAME=PATH, or several of these separated "
                "by commas; a name has letters, digits, '.', '_', ':', '/' and '-'"
            )
        if name in ANY_MODEL:
            raise ConfigError(f"lora (--lora): the name {name!r} stands for any model; choose another name")
        if name in found or name in (config.model_name, config.model):
            raise ConfigError(f"lora (--lora): the name {name!r} is given twice; each adapter needs its own name")
        found[name] = path
    return found


def check_adapters(config: ServeConfig) -> None:
    """Raise ConfigError for settings that cannot be combined with adapters."""
    if config.pipeline_parallel_size > 1 and config.has_adapters:
        raise ConfigError(
            "LoRA adapters (--lora, --enable-lora) and --pipeline-parallel-size cannot be combined yet; leave one of "
            "them out, or merge the adapter into its model"
        )
