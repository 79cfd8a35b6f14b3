"""Define one item of a prediction, from its arrival to its answer: a text, a pair of texts, or an image."""

from __future__ import annotations

from enum import Enum
from math import inf

from msgspec import Struct

from servekit.protocol.prediction import padded_length

NEVER = inf  # the deadline of items without one
PIXELS_PER_TOKEN = 2**12  # that take about as long to decode as a token takes to compute, which depends on the machine
PRIORITY_LEVEL_S = 10.0  # one priority level equals this much waiting time: ageing without a clock


class ItemStatus(Enum):
    """Where an item is. It may go from in flight to waiting again, when its worker is lost."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    DONE = "done"  # answered, aborted, expired or failed


class Item(Struct, eq=False):
    """What the batcher knows of an item. Only the batcher changes `status` and `num_crashes`."""

    item_id: int  # ascends with the arrival
    length: int  # in tokens; for an image, the patches that it becomes
    arrival_s: float
    tenant: str = ""
    priority: int = 0  # lower is more urgent
    deadline_s: float = NEVER
    num_bytes: int = 0  # of an image file; texts are short
    num_pixels: int = 0  # that are decoded for it
    status: ItemStatus = ItemStatus.WAITING
    num_crashes: int = 0  # workers that were lost while they had this item

    @property
    def cost(self) -> int:
        """Tokens that the item takes in a batch, with its padding."""
        return padded_length(self.length)

    @property
    def work(self) -> int:
        """Its tokens, and as many as could be computed while its pixels are decoded."""
        return self.cost + self.num_pixels // PIXELS_PER_TOKEN

    @property
    def rank(self) -> tuple[float, int]:
        """Its place among the items of its tenant: lower is computed first."""
        return self.arrival_s + self.priority * PRIORITY_LEVEL_S, self.item_id

    @property
    def is_alive(self) -> bool:
        return self.status is not ItemStatus.DONE
