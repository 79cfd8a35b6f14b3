"""The public SamplingParams: how to answer a prompt. Its fields are those of the native HTTP API."""

from __future__ import annotations

import msgspec

from servekit.api.schemas.json_body import decode
from servekit.api.schemas.native import GenerationFields
from servekit.errors import InvalidRequest
from servekit.requests.generation import GenerationRequest, Prompt


class SamplingParams(GenerationFields, kw_only=True, frozen=True, omit_defaults=True):  # type: ignore[misc]  # msgspec allows it
    """How to answer a prompt: sampling, length, stops, grammar, logprobs. docs/parameters.md describes each field.

    A field that is None has its default. Raises InvalidRequest, which names the field, its value and the limit.
    """

    def __post_init__(self) -> None:
        self._checked().answering([])

    def answering(self, prompts: list[Prompt]) -> GenerationRequest:
        """Return a request for answers to these prompts."""
        return self._checked().answering(prompts)

    def _checked(self) -> GenerationFields:
        """Return the fields as the HTTP API reads them, so that both have the same types and bounds."""
        try:
            body = msgspec.json.encode(self)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"sampling_params: {error}", param="sampling_params") from None
        return decode(body, GenerationFields)
