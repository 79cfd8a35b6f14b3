"""Find the model that a request names: by its id, by an alias, or by an alias that divides requests among models.

This is pure. A division is deterministic: the same key always gets the same model, as long as the weights stay the
same. When they change, only as many keys move as the change of the weights needs, because each model keeps the keys
whose hash, weighted, is lowest for it (rendezvous hashing; Thaler and Ravishankar, 1998; with weights: Schindelhauer
and Schomaker, 2005).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from math import inf, log
from typing import Annotated, Literal

from msgspec import Meta, Struct

Weight = Annotated[float, Meta(ge=0.0, le=1e6)]
StickyBy = Literal["key", "conversation"]


class Split(Struct, frozen=True):
    """An alias that divides requests among models by weight.

    All requests with the same value of what `sticky` names get the same model.
    """

    models: Mapping[str, Weight]
    sticky: StickyBy = "key"
    mirror: str | None = None  # the model that gets copies of requests; its answers are discarded
    mirror_percent: float = 100.0  # of the requests that are copied

    def is_mirrored(self, request_id: str) -> bool:
        """Return whether a request is copied."""
        return self.mirror is not None and 100.0 * _uniform(request_id.encode(), self.mirror) < self.mirror_percent

    @property
    def ids(self) -> tuple[str, ...]:
        """The models that requests or copies of them go to."""
        return (*self.models, *(() if self.mirror is None else (self.mirror,)))

    def choose(self, key: bytes) -> str:
        """Return the model of a key. Each model gets its share of all keys."""
        best, best_score = "", inf
        for name, weight in self.models.items():
            if weight > 0.0:
                score = -log(_uniform(key, name)) / weight
                if score < best_score:
                    best, best_score = name, score
        assert best, "some weight is above 0"
        return best


def _uniform(key: bytes, name: str) -> float:
    """Return a number above 0 and below 1, which depends on both."""
    digest = blake2b(key, digest_size=8, key=blake2b(name.encode(), digest_size=16).digest()).digest()
    return (int.from_bytes(digest) + 0.5) / 2.0**64


class Names:
    """All names of models: ids, aliases, and aliases that divide requests."""

    def __init__(self, ids: Collection[str], aliases: Mapping[str, str], splits: Mapping[str, Split]) -> None:
        """`aliases` maps names to ids."""
        self._ids = {**{name: name for name in ids}, **aliases}
        self._splits = dict(splits)

    def split(self, name: str) -> Split | None:
        """Return how an alias divides requests; None if it does not."""
        return self._splits.get(name)

    def find(self, name: str) -> str | None:
        """Return the id of a name that is not divided; None if there is none."""
        return self._ids.get(name)

    def __iter__(self) -> Iterator[str]:
        """All names, ids first."""
        return iter((*self._ids, *self._splits))

    def ids_of(self, name: str) -> tuple[str, ...]:
        """The ids of all models that requests with a name may get."""
        split = self._splits.get(name)
        if split is not None:
            return tuple(split.models)
        found = self._ids.get(name)
        return () if found is None else (found,)
