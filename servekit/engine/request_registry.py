"""Find unfinished requests and their sequences by sequence id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, ValuesView

from servekit.engine.request_state import RequestState, SequenceOutput

MAX_DESCRIBED_IDS = 5  # request ids in one log line


class RequestRegistry:
    """All sequences that have not ended, and the requests that they belong to.

    Sequence ids are the keys, because they are unique; clients may choose the ids of their requests.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, SequenceOutput] = {}
        self._requests: dict[int, RequestState] = {}
        # Returns the output of an unfinished sequence by its id; None if the sequence has ended. It is called once for
        # each token, so it is the method of the dict, which takes less time than one written in Python.
        self.output: Callable[[int], SequenceOutput | None] = self._outputs.get

    @property
    def outputs(self) -> ValuesView[SequenceOutput]:
        """The outputs of unfinished sequences, in order of arrival."""
        return self._outputs.values()

    def add(self, request: RequestState, output: SequenceOutput) -> None:
        """Register a sequence and the request that it belongs to."""
        sequence_id = output.sequence.sequence_id
        self._outputs[sequence_id] = output
        self._requests[sequence_id] = request

    def unfinished_siblings(self, sequence_id: int) -> list[SequenceOutput]:
        """The unfinished sequences of the request that this unfinished sequence belongs to, itself included."""
        return self.unfinished(self._requests[sequence_id])

    def unfinished(self, request: RequestState) -> list[SequenceOutput]:
        """The unfinished sequences of a request."""
        return [output for output in request.outputs if output.sequence.sequence_id in self._outputs]

    def find(self, tenant: str, request_id: str) -> list[RequestState]:
        """The unfinished requests of a tenant with this id, which is the client's own and need not be unique."""
        states = self._requests.values()
        found = (each for each in states if each.caller.request_id == request_id and each.caller.tenant == tenant)
        return list(dict.fromkeys(found))

    def remove(self, sequence_id: int) -> None:
        """Forget a sequence that has ended."""
        del self._outputs[sequence_id]
        del self._requests[sequence_id]

    def describe(self, sequence_ids: Iterable[int] | None = None) -> str:
        """The numbers of unfinished sequences and requests, of these or all, and the first request ids, for the log."""
        found = map(self.output, self._outputs if sequence_ids is None else sequence_ids)
        outputs = [output for output in found if output is not None]
        request_ids = list(dict.fromkeys(output.request_id for output in outputs))
        counts = f"{len(outputs)} sequences of {len(request_ids)} requests"
        if not request_ids:
            return counts
        more = ", …" if len(request_ids) > MAX_DESCRIBED_IDS else ""
        return f"{counts} ({', '.join(request_ids[:MAX_DESCRIBED_IDS])}{more})"
