"""Keep what is needed to explain requests: those that run, and the last ones that have ended.

An explanation is computed when it is requested. What it needs is kept for MAX_ENDED requests after their end.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from weakref import WeakValueDictionary

from servekit.engine.request_state import RequestState
from servekit.errors import RequestNotFound
from servekit.scheduler.explanation import Explanation, SequenceEnd, explain
from servekit.time_causes import RequestTimes

MAX_ENDED = 1024


class Explanations:
    """Explains the requests of this process by their ids, each to its own tenant."""

    def __init__(self) -> None:
        # A request whose id another one has, too, is replaced by that one.
        self._running: WeakValueDictionary[tuple[str, str], RequestState] = WeakValueDictionary()
        self._ended: OrderedDict[tuple[str, str], tuple[RequestTimes, SequenceEnd, float]] = OrderedDict()

    def begin(self, state: RequestState) -> None:
        """Note a request that was admitted."""
        caller = state.caller
        self._running[caller.tenant, caller.request_id] = state

    def end(self, state: RequestState, end_s: float) -> None:
        """Note that a request has ended: the last byte of its answer is written, or there is none."""
        times = state.request.times
        if times is None:
            return
        key = state.caller.tenant, state.caller.request_id
        if self._running.get(key) is state:
            del self._running[key]
        self._ended[key] = times, _last_end(state), end_s
        self._ended.move_to_end(key)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def find(self, tenant: str, request_id: str) -> Explanation:
        """Explain the newest request of a tenant with this id. Raises RequestNotFound."""
        key = tenant, request_id
        state = self._running.get(key)
        if state is not None and (found := explain_so_far(state)) is not None:
            return found
        if key not in self._ended:
            raise RequestNotFound(
                f"this process remembers no request {request_id!r} of this tenant; send the X-Request-Id of one that "
                f"generates, or of one of the last {MAX_ENDED} that did",
                param="id",
            )
        times, last, end_s = self._ended[key]
        return explain(request_id, times, last, end_s, is_finished=True)


def explain_so_far(state: RequestState) -> Explanation | None:
    """Explain a request from its beginning until now; None if its times were not recorded."""
    times = state.request.times
    if times is None:
        return None
    return explain(state.caller.request_id, times, _last_end(state), times.clock(), is_finished=False)


def _last_end(state: RequestState) -> SequenceEnd:
    """The end of the answer that ended last, because it decides when the request ends; or one that has not ended."""
    output = max(state.outputs, key=lambda each: inf if each.ended_s is None else each.ended_s)
    sequence = output.sequence
    return SequenceEnd(
        sequence.sequence_id,
        sequence.history,
        sequence.arrival_s,
        sequence.first_scheduled_s,
        output.first_token_s,
        output.ended_s,
        sequence.finish_reason,
    )
