"""TGI's wire format: `inputs` and `parameters` on POST /, /generate and /generate_stream.

Shapes of text-generation-inference 3; `parameters` also takes what servekit has beyond it. As there, an answer is
greedy with `do_sample: false`; unlike there, leaving it out means what the model's own generation_config says.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Raw, Struct, UnsetType

from servekit.errors import InvalidRequest
from servekit.generation_request import GenerationRequest, Prompt
from servekit.schemas.fields import CommonFields, Count, NumAnswers, NumLogprobs, at_least, told
from servekit.schemas.native import GrammarField
from servekit.sequence import FinishReason


class TgiParameters(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """How to answer."""

    max_new_tokens: Annotated[Count | None, told("of the answer; as many as the context holds by default")] = None
    do_sample: Annotated[bool | None, told("false is greedy, true is not; the model's own by default")] = None
    best_of: Annotated[NumAnswers | None, told("answers computed, of which the likeliest is given")] = None
    details: Annotated[bool | None, told("say how it ended, and each token")] = None
    decoder_input_details: Annotated[bool | None, told("each token of the prompt with its logprob")] = None
    top_n_tokens: Annotated[NumLogprobs | None, told("so many of the likeliest beside each token")] = None
    return_full_text: Annotated[bool | None, told("put the prompt before the answer")] = None
    truncate: Annotated[Count | None, told("keep the last so many tokens of the prompt")] = None
    grammar: Annotated[GrammarField | None, told("what the answer must match")] = None
    adapter_id: Annotated[str | None, told("refused: there are no adapters")] = None
    watermark: Annotated[bool | None, told("refused when true: there is no watermark")] = None


class TgiRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body that TGI's clients send."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: Annotated[bool | None, told("answer with server-sent events; on / and /generate")] = None
    model: Annotated[str | None, told("ignored: there is one")] = None
    options: Annotated[dict[str, Raw] | None, told("ignored: an older client's wishes about caches and waiting")] = None

    @property
    def asked(self) -> TgiParameters:
        return self.parameters or TgiParameters()

    def read(self, streams: bool = False) -> GenerationRequest:
        """What is asked for; in a stream, clients expect a number at each token. Raises InvalidRequest."""
        asked = self.asked
        if asked.watermark:
            raise InvalidRequest("watermark = true: there is no watermark here", param="parameters.watermark")
        if asked.adapter_id is not None:
            raise InvalidRequest("adapter_id: there are no adapters here; leave it out", param="parameters.adapter_id")
        return GenerationRequest(
            prompts=[Prompt(self.inputs, "inputs")],
            max_tokens=asked.max_new_tokens,
            grammar=None if asked.grammar is None else asked.grammar.read("parameters.grammar"),
            best_of=at_least(asked.best_of, 1),
            logprobs=asked.top_n_tokens or (0 if streams or asked.details else None),
            prompt_logprobs=0 if asked.details and asked.decoder_input_details else None,
            truncate=asked.truncate,
            **asked.common(asked.do_sample),
        )


def finish_reason(reason: FinishReason, stop_reason: str | int | None) -> str:
    """TGI's word for how an answer ended."""
    if reason is FinishReason.STOP:
        return "eos_token" if stop_reason is None else "stop_sequence"
    return str(reason)


class TgiToken(Struct):
    """One generated token."""

    id: int
    text: str
    logprob: float | None
    special: bool


class TgiPromptToken(Struct):
    """One token of the prompt; the first has no logprob."""

    id: int
    text: str
    logprob: float | None


class TgiSequence(Struct):
    """One of the other answers that `best_of` computed."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET


class TgiDetails(Struct):
    """How an answer came about."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET
    best_of_sequences: list[TgiSequence] | UnsetType = UNSET


class TgiResponse(Struct):
    """Answer to one prompt; on POST / it stands in a list."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET


class TgiStreamDetails(Struct):
    """In a stream's last event, with `details`."""

    finish_reason: str
    generated_tokens: int
    input_length: int
    seed: int | None


class TgiStreamEvent(Struct):
    """One server-sent event."""

    index: int  # of the token, from 1
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None = None
    details: TgiStreamDetails | None = None


# TGI's words for the types of errors.
ERROR_TYPES = {
    "invalid_request_error": "validation",
    "overloaded_error": "overloaded",
    "server_error": "generation",
}

_OWN_NAMES = {"max_tokens": "max_new_tokens", "logprobs": "top_n_tokens"}


def name_of(param: str | None) -> str | None:
    """What a client of this door calls a parameter that an error is about."""
    own = _OWN_NAMES.get(param or "", param)
    return f"parameters.{own}" if own in TgiParameters.__struct_fields__ else param
