"""Define the native wire format: POST /generate, /generate_stream and /basic_generate.

These routes refuse unknown fields: a misspelt `temprature` is reported, not ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from servekit.api.schemas.common_fields import (
    MAX_PROMPTS,
    CommonFields,
    Count,
    NumAnswers,
    NumLogprobs,
    Usage,
    described,
    num_computed,
)
from servekit.errors import InvalidRequest
from servekit.requests.generation import GenerationRequest, Grammar, GrammarKind, Prompt
from servekit.scheduler.explanation import Explanation
from servekit.scheduler.sequence import FinishReason


class GrammarField(Struct, kw_only=True, forbid_unknown_fields=True):
    """A grammar that the answer must match."""

    type: Annotated[
        Literal["json_schema", "json", "regex", "ebnf", "choice"],
        described("the kind of grammar; json without a value is any JSON object, with one the same as json_schema"),
    ]
    value: Annotated[
        str | list[str] | dict[str, Raw] | None,
        described(
            "the schema (an object or its text), the regular expression, the Lark grammar, or the list of choices"
        ),
    ] = None

    def to_grammar(self, param: str) -> Grammar:
        """Return the grammar of the field `param`. Raises InvalidRequest if type and value do not match."""
        match self.type, self.value:
            case "json", None:
                return Grammar(GrammarKind.JSON, "", param)
            case "json" | "json_schema", dict() as schema:
                # TGI's clients wrap the schema of a `json_schema` as OpenAI's do.
                inner = schema["schema"] if "schema" in schema and schema.keys() <= {"name", "schema"} else schema
                return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(inner).decode(), param)
            case (("json" | "json_schema"), str() as text):
                return Grammar(GrammarKind.JSON_SCHEMA, text, param)
            case (("regex" | "ebnf"), str() as text):
                return Grammar(GrammarKind(self.type), text, param)
            case "choice", [_, *_] as choices:
                return Grammar(GrammarKind.CHOICE, msgspec.json.encode(choices).decode(), param)
        needs = {"choice": "a list of strings", "json_schema": "a JSON schema", "json": "a JSON schema or no value"}
        raise InvalidRequest(
            f"{param}.value: type {self.type!r} needs {needs.get(self.type, 'a string')}", param=f"{param}.value"
        )


class GenerationFields(CommonFields, kw_only=True):
    """How to answer a prompt: the fields of /generate, and of `servekit.SamplingParams`."""

    max_tokens: Annotated[Count | None, described("maximum length of the answer; default: what the context holds")] = (
        None
    )
    n: Annotated[NumAnswers | None, described("number of answers to each prompt; the prompt is computed once")] = None
    best_of: Annotated[NumAnswers | None, described("number of answers to compute; the n likeliest are returned")] = (
        None
    )
    logprobs: Annotated[
        NumLogprobs | None, described("return the logprob of each token, and of this many likeliest tokens")
    ] = None
    prompt_logprobs: Annotated[NumLogprobs | None, described("the same for the tokens of the prompt")] = None
    grammar: Annotated[GrammarField | None, described("grammar that the answer must match")] = None

    def answering(self, prompts: list[Prompt]) -> GenerationRequest:
        """Return a request for answers to these prompts, in the form that all APIs share. Raises InvalidRequest."""
        n = self.n or 1
        return GenerationRequest(
            prompts=prompts,
            max_tokens=self.max_tokens,
            grammar=None if self.grammar is None else self.grammar.to_grammar("grammar"),
            n=n,
            best_of=num_computed(self.best_of, n),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            **self.common(),
        )


class GenerateRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /generate and /generate_stream. `prompt` is one text, `prompts` a list of them."""

    prompt: str | None = None
    prompts: Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    max_new_tokens: Annotated[Count | None, described("another name of max_tokens")] = None
    stream: Annotated[bool | None, described("send the answer as server-sent events")] = None
    model: Annotated[str | None, described("name of the model; default: the server's default model")] = None
    adapter_id: Annotated[str | None, described("name of a LoRA adapter of the model (docs/lora.md)")] = None
    explain: Annotated[bool | None, described("return where the request's time went (docs/explain.md)")] = None

    def to_generation_request(self) -> GenerationRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        if (self.prompt is None) == (self.prompts is None):
            raise InvalidRequest("send either 'prompt' (a string) or 'prompts' (a list of strings)", param="prompt")
        if self.prompts is not None:
            prompts = [Prompt(text, f"prompts[{index}]") for index, text in enumerate(self.prompts)]
        else:
            assert isinstance(self.prompt, str)
            prompts = [Prompt(self.prompt, "prompt")]
        request = msgspec.structs.replace(self.answering(prompts), explain=bool(self.explain))
        if self.max_new_tokens is None:
            return request
        if self.max_tokens is not None:
            raise InvalidRequest(
                "max_tokens and max_new_tokens are two names of one parameter; send one of them", param="max_new_tokens"
            )
        return msgspec.structs.replace(request, max_tokens=self.max_new_tokens)

    @property
    def gives_one_text(self) -> bool:
        return self.prompts is None and (self.n or 1) == 1


RequestId = Annotated[str, Meta(min_length=1, max_length=64)]


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /abort_request, as SGLang's clients send it."""

    rid: Annotated[
        RequestId | None,
        described("id of the request: the header X-Request-Id that it was sent with, or answered with"),
    ] = None
    request_id: Annotated[RequestId | None, described("another name of rid")] = None
    abort_all: Annotated[bool | None, described("refused if true: requests are aborted one by one")] = None

    def wanted_id(self) -> str:
        """Return the id of the request to end. Raises InvalidRequest for none or two, and for all requests at once."""
        if self.abort_all:
            raise InvalidRequest("abort_all is not supported; send the rid of each request", param="abort_all")
        if self.rid is not None and self.request_id is not None:
            raise InvalidRequest(
                "rid and request_id are two names of one parameter; send one of them", param="request_id"
            )
        wanted = self.request_id if self.rid is None else self.rid
        if wanted is None:
            raise InvalidRequest("send 'rid': the X-Request-Id of the request to end", param="rid")
        return wanted


class AbortResponse(Struct):
    """How many answers were ended."""

    num_aborted: int


class TopToken(Struct):
    """One of the likeliest tokens at a position."""

    id: int
    text: str
    logprob: float


class Token(Struct):
    """One token. In a stream, `text` is the text that it completed: it may be empty, or more than the token's own."""

    id: int
    text: str
    special: bool
    logprob: float | None = None
    top_logprobs: list[TopToken] | UnsetType = UNSET


class RequestMetrics(Struct):
    """Times of an answer in milliseconds, counted from the request's arrival."""

    queue_time_ms: float  # until the first step that computed part of it
    time_to_first_token_ms: float
    total_time_ms: float


class GenerateResponse(Struct):
    """The answer to one prompt."""

    id: str
    generated_text: str
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token that ended it; null for the model's own end
    usage: Usage
    metrics: RequestMetrics | UnsetType = UNSET  # absent if the answer has no token
    tokens: list[Token] | UnsetType = UNSET  # with `logprobs`
    prompt_tokens: list[Token] | UnsetType = UNSET  # with `prompt_logprobs`
    explanation: Explanation | UnsetType = UNSET  # with `explain`


class BatchGenerateResponse(Struct):
    """The answers to a list of prompts, in their order. With `n`, all answers to the first prompt come first."""

    id: str
    generated_texts: list[str]
    finish_reasons: list[FinishReason]
    stop_reasons: list[str | int | None]
    usage: Usage
    tokens: list[list[Token]] | UnsetType = UNSET
    prompt_tokens: list[list[Token]] | UnsetType = UNSET
    explanation: Explanation | UnsetType = UNSET


class BasicGenerateResponse(Struct):
    """The answer to one prompt, as text alone."""

    generated_text: str


class StreamEvent(Struct):
    """One server-sent event. The last one has the whole text and the reason why it ended."""

    index: int  # of the token, from 1; without a token, that of the last one
    token: Token | None  # null if a deadline ends the answer without another token
    generated_text: str | None = None
    details: None = None  # TGI's clients read this key
    id: str | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_tokens: list[Token] | UnsetType = UNSET
    explanation: Explanation | UnsetType = UNSET
