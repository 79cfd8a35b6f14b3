"""Keep the data to explain requests: those that run, and the last ones that have ended.

An explanation is computed when it is requested. What it needs is kept for MAX_ENDED requests after their end, or for
fewer if their histories are long. If there are too many, the oldest one of the tenant that has the most is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from weakref import WeakValueDictionary

from msgspec import Struct

from servekit.engine.request_state import RequestState
from servekit.errors import RequestNotFound
from servekit.requests.time_causes import RequestTimes
from servekit.scheduler.explanation import Explanation, SequenceEnd, explain

MAX_ENDED = 1024
MAX_ENDED_SPANS = 2**16  # of all requests that have ended; one takes about 250 bytes


class _Ended(Struct, frozen=True):
    """A request that has ended."""

    times: RequestTimes
    last: SequenceEnd
    end_s: float
    num_spans: int


class _TenantsEnded:
    """The requests of one tenant that have ended, by their ids."""

    def __init__(self) -> None:
        self.requests: OrderedDict[str, _Ended] = OrderedDict()
        self.num_spans = 0

    def add(self, request_id: str, ended: _Ended) -> None:
        self.remove(request_id)
        self.requests[request_id] = ended
        self.num_spans += ended.num_spans

    def remove(self, request_id: str) -> None:
        """Forget a request, if there is one with this id."""
        ended = self.requests.pop(request_id, None)
        if ended is not None:
            self.num_spans -= ended.num_spans

    def remove_oldest(self) -> None:
        self.remove(next(iter(self.requests)))


class Explanations:
    """Explains the requests of this process by their ids, each to its own tenant."""

    def __init__(self) -> None:
        # A request whose id another one has, too, is replaced by that one.
        self._running: WeakValueDictionary[tuple[str, str], RequestState] = WeakValueDictionary()
        self._ended: dict[str, _TenantsEnded] = {}  # by tenant
        self._num_requests = 0  # that have ended, of all tenants
        self._num_spans = 0  # of these

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
        tenant, request_id = key
        last = _last_end(state)
        ended = _Ended(times, last, end_s, last.history.num_spans)
        of_tenant = self._ended.setdefault(tenant, _TenantsEnded())
        with self._counting(of_tenant):
            of_tenant.add(request_id, ended)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the oldest requests of the tenant that has the most, while there are too many."""
        tenants = self._ended
        while self._num_requests > MAX_ENDED or self._num_spans > MAX_ENDED_SPANS:
            is_too_long = self._num_spans > MAX_ENDED_SPANS
            name, most = max(
                tenants.items(), key=lambda item: item[1].num_spans if is_too_long else len(item[1].requests)
            )
            with self._counting(most):
                most.remove_oldest()
            if not most.requests:
                del tenants[name]

    @contextmanager
    def _counting(self, tenant: _TenantsEnded) -> Iterator[None]:
        """Keep the totals over all tenants while the requests of one change."""
        num_requests, num_spans = len(tenant.requests), tenant.num_spans
        yield
        self._num_requests += len(tenant.requests) - num_requests
        self._num_spans += tenant.num_spans - num_spans

    def find(self, tenant: str, request_id: str) -> Explanation:
        """Explain the newest request of a tenant with this id. Raises RequestNotFound."""
        key = tenant, request_id
        state = self._running.get(key)
        if state is not None and (found := explain_so_far(state)) is not None:
            return found
        ended = self._ended[tenant].requests.get(request_id) if tenant in self._ended else None
        if ended is None:
            raise RequestNotFound(
                f"there is no request {request_id!r} of this tenant to explain; send the X-Request-Id of a running or "
                f"recent one: at most {MAX_ENDED} ended requests are remembered, of all tenants together",
                param="id",
            )
        return explain(request_id, ended.times, ended.last, ended.end_s, is_finished=True)


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
