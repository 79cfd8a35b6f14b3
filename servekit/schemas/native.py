"""The native wire format: POST /generate, /generate_stream and /basic_generate.

These routes refuse fields they do not know: a misspelt `temprature` is a mistake to report, not to ignore.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from servekit.errors import InvalidRequest
from servekit.generation_request import GenerationRequest, Grammar, GrammarKind, Prompt
from servekit.schemas.fields import MAX_PROMPTS, CommonFields, Count, NumAnswers, NumLogprobs, Usage, at_least, told
from servekit.sequence import FinishReason


class GrammarField(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer must match."""

    type: Annotated[
        Literal["json_schema", "json", "regex", "ebnf", "choice"],
        told("json without a value is any JSON object, and with one the same as json_schema"),
    ]
    value: Annotated[
        str | list[str] | dict[str, Raw] | None,
        told("the schema (an object or its text), the regular expression, the grammar in Lark's notation, the choices"),
    ] = None

    def read(self, param: str) -> Grammar:
        """Raises InvalidRequest where type and value do not go together."""
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
        needs = {"choice": "a list of texts", "json_schema": "a JSON schema", "json": "a JSON schema or nothing"}
        raise InvalidRequest(
            f"{param}: type {self.type!r} needs {needs.get(self.type, 'a string')} as its value", param=f"{param}.value"
        )


class GenerateRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /generate and /generate_stream; `prompt` asks for one text, `prompts` for a list of them."""

    prompt: str | None = None
    prompts: Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    max_tokens: Annotated[Count | None, told("of the answer; as many as the context holds by default")] = None
    n: Annotated[NumAnswers | None, told("answers to each prompt, which is computed once")] = None
    best_of: Annotated[NumAnswers | None, told("answers computed, of which the n likeliest are given")] = None
    logprobs: Annotated[NumLogprobs | None, told("of each token, and of so many of the likeliest")] = None
    prompt_logprobs: Annotated[NumLogprobs | None, told("the same for the prompt")] = None
    grammar: Annotated[GrammarField | None, told("what the answer must match")] = None
    stream: Annotated[bool | None, told("answer with server-sent events")] = None

    def read(self) -> GenerationRequest:
        """What is asked for. Raises InvalidRequest."""
        if (self.prompt is None) == (self.prompts is None):
            raise InvalidRequest("give either 'prompt' (a string) or 'prompts' (a list of strings)", param="prompt")
        if self.prompts is not None:
            prompts = [Prompt(text, f"prompts[{index}]") for index, text in enumerate(self.prompts)]
        else:
            assert isinstance(self.prompt, str)
            prompts = [Prompt(self.prompt, "prompt")]
        n = self.n or 1
        return GenerationRequest(
            prompts=prompts,
            max_tokens=self.max_tokens,
            grammar=None if self.grammar is None else self.grammar.read("grammar"),
            n=n,
            best_of=at_least(self.best_of, n),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            **self.common(),
        )

    @property
    def gives_one_text(self) -> bool:
        return self.prompts is None and (self.n or 1) == 1


class TopToken(Struct):
    """One of the likeliest tokens at a position."""

    id: int
    text: str
    logprob: float


class Token(Struct):
    """One token. In a stream, `text` is what it made certain: nothing yet, or more than itself."""

    id: int
    text: str
    special: bool
    logprob: float | None = None
    top_logprobs: list[TopToken] | UnsetType = UNSET


class RequestMetrics(Struct):
    """Where an answer's time went, in milliseconds from the request's arrival; what lies between is computing."""

    queue_time_ms: float  # until the first step that had some of it
    time_to_first_token_ms: float
    total_time_ms: float


class GenerateResponse(Struct):
    """Answer to one prompt."""

    id: str
    generated_text: str
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token that ended it; null at the model's own end
    usage: Usage
    metrics: RequestMetrics | UnsetType = UNSET  # of one that came to a token
    tokens: list[Token] | UnsetType = UNSET  # with `logprobs`
    prompt_tokens: list[Token] | UnsetType = UNSET  # with `prompt_logprobs`


class BatchGenerateResponse(Struct):
    """Answers to a list of prompts in their order; with `n`, those to the first prompt come first."""

    id: str
    generated_texts: list[str]
    finish_reasons: list[FinishReason]
    stop_reasons: list[str | int | None]
    usage: Usage
    tokens: list[list[Token]] | UnsetType = UNSET
    prompt_tokens: list[list[Token]] | UnsetType = UNSET


class BasicGenerateResponse(Struct):
    """Answer to one prompt, and nothing else."""

    generated_text: str


class StreamEvent(Struct):
    """One server-sent event. The last one has the whole text and says why it ended."""

    index: int  # of the token, from 1; where there is none, of the last one
    token: Token | None  # null where the answer ends without another one, at a deadline
    generated_text: str | None = None
    details: None = None  # a key that TGI's clients look for
    id: str | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_tokens: list[Token] | UnsetType = UNSET
