"""Describe one HTTP request for a trace: where its time went and what it cost, without prompts or answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from servekit.requests.generation import GenerationRequest
from servekit.scheduler.sequence import FinishReason


class AnswerTrace(Struct, frozen=True, kw_only=True):
    """The life of one answer. All times are seconds on the engine's clock; None for events that did not happen."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_tokens: int
    num_preemptions: int
    finish_reason: FinishReason | None

    def phases(self, ended_s: float) -> Iterator[tuple[str, float, float]]:
        """(name, start, end) of queue, prefill and decode, as far as the answer came. Each starts where one ended."""
        scheduled_s, first_s, last_s = self.first_scheduled_s, self.first_token_s, self.last_token_s
        yield "queue", self.arrival_s, ended_s if scheduled_s is None else scheduled_s
        if scheduled_s is not None:
            yield "prefill", scheduled_s, ended_s if first_s is None else first_s
        if first_s is not None and last_s is not None:
            yield "decode", first_s, last_s


class RequestTrace(Struct, frozen=True, kw_only=True):
    """One HTTP request, from its head to the last byte of its response."""

    method: str
    route: str
    status: int
    headers: Mapping[str, str]
    request_id: str
    started_s: float
    ended_s: float
    request: GenerationRequest | None = None  # None if the request was refused, or generates nothing
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    answers: Sequence[AnswerTrace] = ()

    @property
    def is_failed(self) -> bool:
        """Whether the server failed. Client errors and disconnects do not count."""
        return self.status >= 500 or any(answer.finish_reason is FinishReason.ERROR for answer in self.answers)

    @property
    def first_token_s(self) -> float | None:
        """The earliest first token of all answers."""
        return min((each.first_token_s for each in self.answers if each.first_token_s is not None), default=None)

    def attributes(self, model_name: str) -> dict[str, Any]:
        """Span attributes, named by OpenTelemetry's semantic conventions for HTTP and for generative AI."""
        attributes: dict[str, Any] = {
            "http.request.method": self.method,
            "http.route": self.route,
            "http.response.status_code": self.status,
            "servekit.request_id": self.request_id,
        }
        if self.is_failed:
            attributes["error.type"] = str(self.status) if self.status >= 500 else "generation"
        if self.request is None:
            return attributes
        sampling = self.request.sampling
        parameters = {
            "max_tokens": self.request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "choice.count": self.request.n,
        }
        return attributes | {
            "gen_ai.operation.name": "chat" if "chat" in self.route else "text_completion",
            "gen_ai.provider.name": "servekit",
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            **{f"gen_ai.request.{name}": value for name, value in parameters.items() if value is not None},
            "gen_ai.usage.input_tokens": self.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.num_cached_tokens,
            "gen_ai.usage.output_tokens": sum(answer.num_tokens for answer in self.answers),
            "gen_ai.response.finish_reasons": [str(answer.finish_reason or "none") for answer in self.answers],
            "servekit.num_preemptions": sum(answer.num_preemptions for answer in self.answers),
            "servekit.num_drafted_tokens": self.num_drafted_tokens,
            "servekit.num_accepted_tokens": self.num_accepted_tokens,
        }
