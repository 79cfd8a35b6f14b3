"""Define TGI's wire format: bodies with `inputs` and `parameters`, on POST /, /generate and /generate_stream.

The shapes are those of text-generation-inference 3; `parameters` also takes servekit's further fields. As in TGI,
`do_sample: false` is greedy. Unlike TGI, without `do_sample` the model's own generation_config decides.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from servekit.api.schemas.common_fields import CommonFields, Count, NumAnswers, NumLogprobs, described, num_computed
from servekit.api.schemas.json_body import MAX_BODY_DECODED_TWICE, decode
from servekit.api.schemas.native import GrammarField
from servekit.errors import InvalidRequest
from servekit.requests.generation import GenerationRequest, Prompt
from servekit.scheduler.sequence import FinishReason


class TgiParameters(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """How to generate the answer."""

    max_new_tokens: Annotated[
        Count | None, described("maximum length of the answer; default: what the context holds")
    ] = None
    do_sample: Annotated[bool | None, described("false is greedy, true samples; default: the model's own")] = None
    best_of: Annotated[NumAnswers | None, described("number of answers to compute; the likeliest is returned")] = None
    details: Annotated[bool | None, described("return the finish reason and each token")] = None
    decoder_input_details: Annotated[bool | None, described("return each token of the prompt with its logprob")] = None
    top_n_tokens: Annotated[NumLogprobs | None, described("return this many likeliest tokens with each token")] = None
    return_full_text: Annotated[bool | None, described("put the prompt before the answer")] = None
    truncate: Annotated[Count | None, described("keep only this many tokens of the prompt, the last ones")] = None
    grammar: Annotated[GrammarField | None, described("grammar that the answer must match")] = None
    adapter_id: Annotated[str | None, described("name of a LoRA adapter of the model (docs/lora.md)")] = None
    watermark: Annotated[bool | None, described("refused if true: watermarks are not supported")] = None


class TgiRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body that TGI's clients send."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: Annotated[bool | None, described("send the answer as server-sent events; on / and /generate")] = None
    model: Annotated[str | None, described("name of the model; ignored if the server has one")] = None
    options: Annotated[
        dict[str, Raw] | None, described("ignored: older clients send options of Hugging Face's own API")
    ] = None

    @property
    def given_parameters(self) -> TgiParameters:
        return self.parameters or TgiParameters()

    def to_generation_request(self, stream: bool = False) -> GenerationRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest.

        In a stream, clients expect a logprob for each token.
        """
        given = self.given_parameters
        if given.watermark:
            raise InvalidRequest("watermark = true is not supported; leave it out", param="parameters.watermark")
        return GenerationRequest(
            prompts=[Prompt(self.inputs, "inputs")],
            max_tokens=given.max_new_tokens,
            grammar=None if given.grammar is None else given.grammar.to_grammar("parameters.grammar"),
            best_of=num_computed(given.best_of, 1),
            logprobs=given.top_n_tokens or (0 if stream or given.details else None),
            prompt_logprobs=0 if given.details and given.decoder_input_details else None,
            truncate=given.truncate,
            **given.common(given.do_sample),
        )


# Hugging Face's clients send all tasks to one URL. These fields of the body, its `inputs` or its `parameters` belong to
# tasks other than text generation, as the methods of huggingface_hub's InferenceClient send them.
_TASK_OF_FIELD = {
    "normalize": "feature_extraction",
    "prompt_name": "feature_extraction",
    "truncation_direction": "feature_extraction",
    "sentences": "sentence_similarity",
    "table": "table_question_answering or tabular_classification",
    "image": "visual_question_answering",
    "context": "question_answering",
    "candidate_labels": "zero_shot_classification",
    "function_to_apply": "text_classification",
    "targets": "fill_mask",
    "aggregation_strategy": "token_classification",
    "ignore_labels": "token_classification",
    "src_lang": "translation",
    "tgt_lang": "translation",
    "clean_up_tokenization_spaces": "summarization",
    "generate_parameters": "summarization or translation",
    "num_inference_steps": "text_to_image",
    "guidance_scale": "text_to_image",
}


def other_task(body: bytes) -> str | None:
    """Return the task that a body is for, if its fields show that it is not text generation.

    For bodies that are no TgiRequest: its fields are not checked here.
    """
    try:
        content = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    inputs, parameters = content.get("inputs"), content.get("parameters")
    fields = {*content}
    for value in (inputs, parameters):
        if isinstance(value, dict):
            fields |= value.keys()
    for field, task in _TASK_OF_FIELD.items():
        if field in fields:
            return task
    return "feature_extraction" if isinstance(inputs, list) else None


def unsupported_task(task: str) -> InvalidRequest:
    """Return the error for a request that is for another task."""
    return InvalidRequest(
        f"the request is for the task {task}; this server supports text_generation and chat_completion only",
        code="not_supported",
    )


def decode_tgi(body: bytes) -> TgiRequest:
    """Decode a body. Raises InvalidRequest, with the task's name if its fields are those of another task."""
    try:
        return decode(body, TgiRequest)
    except InvalidRequest:
        task = other_task(body) if len(body) <= MAX_BODY_DECODED_TWICE else None
        if task is not None:
            raise unsupported_task(task) from None
        raise


def finish_reason(reason: FinishReason, stop_reason: str | int | None) -> str:
    """Return TGI's name of a finish reason."""
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
    """One of the other answers that were computed for `best_of`."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET


class TgiDetails(Struct):
    """How an answer was generated."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET
    best_of_sequences: list[TgiSequence] | UnsetType = UNSET


class TgiResponse(Struct):
    """The answer to one prompt; on POST / in a list."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET


class TgiStreamDetails(Struct):
    """Details in a stream's last event, if the request has `details`."""

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


# TGI's names for the types of errors.
ERROR_TYPES = {
    "invalid_request_error": "validation",
    "overloaded_error": "overloaded",
    "server_error": "generation",
}

_OWN_NAMES = {"max_tokens": "max_new_tokens", "logprobs": "top_n_tokens"}


def tgi_param(param: str | None) -> str | None:
    """Return TGI's name of the parameter that an error is about."""
    own = _OWN_NAMES.get(param or "", param)
    return f"parameters.{own}" if own in TgiParameters.__struct_fields__ else param
