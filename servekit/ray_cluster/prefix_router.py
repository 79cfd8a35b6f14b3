"""A request router of Ray Serve: a request goes to a server that has had the beginning of its prompt.

Each replica of the ingress has a table of its own, so several of them know less than one.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter

from servekit.ray_cluster.prefix_routing import prompt_of, rank
from servekit.ray_cluster.prefix_table import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # without Ray, its classes are Any
    """Prefers the replicas that have the prompt's prefix, unless they have much more to do than others."""

    def initialize_state(self) -> None:
        """Begin with an empty table. Ray Serve calls it once."""
        self._table = PrefixTable()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        """Return the candidates by rank. Of one rank, Ray Serve takes the replica with the fewest requests."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all refuse; otherwise Ray Serve asks without a pause
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))  # Ray Serve takes the first of equal ones
        candidates = {each.replica_id: each for each in shuffled}
        num_requests = {each: self.replica_queue_len_cache.get(each) or 0 for each in candidates}
        ranks = rank(self._table, _prompt_of(pending_request), num_requests)
        return [[candidates[each] for each in one_rank] for one_rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Remember where a prompt went."""
        self._table.add(_prompt_of(pending_request), replica_id)


def _prompt_of(pending_request: Any) -> bytes:
    return prompt_of(pending_request.args[0].body) if pending_request.args else b""
