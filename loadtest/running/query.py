"""One request of a plan over HTTP, for one turn or a batch of them, and the records of its answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from loadtest.planning.plan import Request
from loadtest.record import Counted, Outcome, Record
from loadtest.running.api_formats import History, body_of
from loadtest.running.batch_reply import BatchAnswer, GarbledReply, read_batch
from loadtest.running.clock import now_s
from loadtest.running.error_bodies import refusal_code, refusal_message
from loadtest.running.exchange import Exchange
from loadtest.running.stream_reader import StreamReader, reader_for
from loadtest.target import ApiFormat, Target


class Turn(Struct, frozen=True, gc=False):
    """A request and the conversation up to its own prompt, which comes last."""

    request: Request
    history: tuple[str, ...]
    client: Any = None  # of a closed loop; it is notified of the end


class Owner(Protocol):
    """What a query calls back."""

    def on_first_byte(self, first_s: float) -> None:
        """The first bytes of a stream came so long after its intended start."""

    def on_buffer_full(self, query: Query) -> None:
        """Much of the stream is unread; read it with `query.read()`."""

    def on_query_end(self, query: Query) -> None:
        """The query has ended, in whichever way."""


class Query(Exchange):
    """One request over HTTP. Times are those of the clock until records are made."""

    __slots__ = ("_api", "_keeps_text", "_owner", "_reader", "begun_s", "intended_s", "turns")

    def __init__(
        self,
        owner: Owner,
        target: Target,
        model: str | None,
        turns: Sequence[Turn],
        intended_s: float,
        keeps_text: bool,
    ) -> None:
        histories: list[History] = [turn.history for turn in turns]
        super().__init__(body_of(target, model, histories, turns[0].request.max_tokens))
        self.turns = turns
        self.intended_s = intended_s
        self.begun_s = now_s()
        self._owner = owner
        self._api = target.api
        self._keeps_text = keeps_text
        self._reader: StreamReader | None = None

    def on_first(self) -> None:
        self._owner.on_first_byte(self.first_s - self.intended_s)

    def on_full(self) -> None:
        self.full_at = sys.maxsize  # until it is read
        if self.status == 200 and self._api is not ApiFormat.GENERATE:
            self._owner.on_buffer_full(self)

    def on_end(self) -> None:
        self._owner.on_query_end(self)

    def records(self, start_s: float, process: int) -> tuple[list[Record], list[str]]:
        """Return one record for each turn, and the texts of the answers, empty if not kept. To be called once."""
        outcome, error = self.outcome, self.error
        if outcome is None and self.status != 200:
            outcome, error = Outcome.REFUSED, refusal_code(self.received) or str(self.status)
        elif self.status == 200 and self._api is ApiFormat.GENERATE:
            return self._batch(start_s, process)
        elif self.status == 200 and self.is_stream:
            return self._streamed(start_s, process)
        elif outcome is None:
            outcome, error = Outcome.GARBLED, "the content-type of the answer is not text/event-stream"
        records = [self._record(turn.request, outcome, error, start_s, process) for turn in self.turns]
        return records, [""] * len(records)

    @property
    def refusal(self) -> str:
        """The server's message for a refusal; empty if it is not a refusal, or has no message."""
        return refusal_message(self.received) if self.outcome is None and self.status != 200 else ""

    def read(self) -> StreamReader:
        """Read what has come of the stream."""
        if self._reader is None:
            self._reader = reader_for(self._api, self._keeps_text)
            assert self._reader is not None
        self.discard(self._reader.feed(self.received, self.ends, self.times_s))
        return self._reader

    def _batch(self, start_s: float, process: int) -> tuple[list[Record], list[str]]:
        outcome, error = self.outcome, self.error
        answers: list[BatchAnswer] = []
        if outcome is None:
            try:
                answers = read_batch(self.received, len(self.turns), self.turns[0].request.max_tokens)
                outcome = Outcome.OK
            except GarbledReply as garbled:
                outcome, error = Outcome.GARBLED, str(garbled)
        records = [self._record(turn.request, outcome, error, start_s, process) for turn in self.turns]
        if not answers:
            return records, [""] * len(records)
        for record, answer in zip(records, answers, strict=True):
            record.num_prompt_tokens, record.finish_reason = answer.num_prompt_tokens, answer.finish_reason
            if answer.num_output_tokens is not None:
                record.num_output_tokens, record.counted_by = answer.num_output_tokens, Counted.USAGE
        return records, [answer.text for answer in answers]

    def _streamed(self, start_s: float, process: int) -> tuple[list[Record], list[str]]:
        reader = self.read()
        if self.outcome is None:
            outcome, error = reader.verdict()
        else:
            outcome, error = reader.error or (self.outcome, self.error)
        record = self._record(self.turns[0].request, outcome, error, start_s, process)
        record.token_times_s = [time_s - start_s for time_s in reader.token_times_s]
        if reader.num_seen_tokens != len(reader.token_times_s):
            record.tokens_per_event = reader.tokens_per_event.tolist()
        reported = reader.num_output_tokens
        record.num_output_tokens = reader.num_seen_tokens if reported is None else reported
        record.num_prompt_tokens = reader.num_prompt_tokens
        record.counted_by = reader.counted_by
        record.finish_reason = reader.finish_reason
        if reader.queue_s is not None:
            record.queue_s = reader.queue_s
        return [record], [reader.text]

    def _record(self, request: Request, outcome: Outcome, error: str, start_s: float, process: int) -> Record:
        return Record(
            index=request.index,
            intended_s=self.intended_s - start_s,
            started_s=(self.started_s or self.ended_s) - start_s,
            ended_s=self.ended_s - start_s,
            outcome=outcome,
            status=self.status,
            error=error,
            queue_s=self.queue_s,
            process=process,
            group=request.group,
        )
