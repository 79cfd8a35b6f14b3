"""Define the workload of a laboratory run: requests with arrival times and lengths."""

from __future__ import annotations

from msgspec import Struct


class LabRequest(Struct, frozen=True):
    """One request. Its answer has exactly `num_output_tokens` tokens."""

    arrival_s: float
    prompt: tuple[int, ...]
    num_output_tokens: int


class Workload(Struct, frozen=True):
    """Requests, in order of arrival."""

    name: str
    requests: tuple[LabRequest, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def max_length(self) -> int:
        """The most tokens of one request, prompt and answer."""
        return max(len(request.prompt) + request.num_output_tokens for request in self.requests)
