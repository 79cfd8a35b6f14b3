"""Simulate the memory through which prefill workers hand blocks over to decode workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from servekit.protocol.messages import StepPlan, TransferReport
from servekit.simulation.page import Page
from servekit.simulation.worker import Violation


class SimulatedRing:
    """The blocks that one prefill replica has sent. It is the server's, and so it outlives workers.

    If there is no room, the oldest blocks are overwritten.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pages: OrderedDict[bytes, Page] = OrderedDict()
        self.damaged: set[bytes] = set()

    def append(self, key: bytes, page: Page) -> None:
        """Keep a block. Raises Violation if its key has other contents already."""
        if self.pages.setdefault(key, page.copy()) != page:
            raise Violation(f"a block is sent with other contents than those that its key had before: {page}")
        self.pages.move_to_end(key)
        while len(self.pages) > self.num_blocks:
            self.damaged.discard(self.pages.popitem(last=False)[0])


class SimulatedSender:
    """The KV connector of a prefill worker: it sends, and never loads."""

    def __init__(self, ring: SimulatedRing) -> None:
        self._ring = ring
        self._known = set(ring.pages)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """What others can load."""
        return tuple(self._ring.pages)

    def execute(self, plan: StepPlan, pages: list[Page]) -> TransferReport:
        """Do what comes before the step. Raises Violation for a plan that is for another kind of connector."""
        if plan.loads or plan.stores:
            raise Violation(f"{plan} is for a worker that loads")
        return TransferReport()

    def send(self, plan: StepPlan, pages: list[Page], report: TransferReport) -> TransferReport:
        """Do what comes behind the step. Raises Violation if a key gets two contents."""
        for block, key in plan.sends:
            self._ring.append(key, pages[block])
            self._known.add(key)
        dropped = self._known - self._ring.pages.keys()
        self._known -= dropped
        return replace(report, dropped_keys=tuple(sorted(dropped)), num_sent=len(plan.sends))

    def damage(self, number: int) -> None:
        """Let the loads of some blocks fail, as if by chance."""
        self._ring.damaged.update(key for index, key in enumerate(self._ring.pages) if (index + number) % 3 == 0)


class SimulatedReceiver:
    """The KV connector of a decode worker: it loads what prefill workers have sent."""

    def __init__(self, rings: Iterable[SimulatedRing]) -> None:
        self._rings = list(rings)
        self._known = set(self.keys)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """What can be loaded."""
        return tuple(key for ring in self._rings for key in ring.pages)

    def execute(self, plan: StepPlan, pages: list[Page]) -> TransferReport:
        """Load what a plan says. A load that fails leaves garbage. Raises Violation as of SimulatedSender."""
        if plan.stores or plan.sends:
            raise Violation(f"{plan} is for a worker that sends")
        failed = []
        for index, (key, block) in enumerate(plan.loads):
            ring = next((ring for ring in self._rings if key in ring.pages and key not in ring.damaged), None)
            if ring is None:
                failed.append(index)
                pages[block] = Page.of_garbage(len(pages[block].states))
            else:
                pages[block] = ring.pages[key].copy()
        # Like a worker, it notices what was overwritten when it has the next step.
        keys = set(self.keys)
        dropped, self._known = self._known - keys, keys
        return TransferReport(tuple(failed), tuple(sorted(dropped)), num_received=len(plan.loads) - len(failed))

    def send(self, plan: StepPlan, pages: list[Page], report: TransferReport) -> TransferReport:
        """Do nothing: it sends nothing."""
        return report

    def damage(self, number: int) -> None:
        """Do nothing: blocks are damaged where they are sent from."""
