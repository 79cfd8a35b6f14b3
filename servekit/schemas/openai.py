"""OpenAI's wire format: /v1/completions, /v1/chat/completions and /v1/models, with vLLM's extensions.

These routes ignore fields they do not know, because clients and load tools send many; a field that would change the
answer and is not honoured (`tools`, `suffix`) is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from servekit.errors import InvalidRequest
from servekit.generation_request import GenerationRequest, Grammar, GrammarKind, Prompt
from servekit.schemas.fields import (
    MAX_PROMPTS,
    Bound,
    CommonFields,
    Count,
    NumAnswers,
    NumLogprobs,
    TokenId,
    at_least,
    told,
)
from servekit.sequence import FinishReason

# -- what both routes take ---------------------------------------------------------------------------------------------


class JsonSchema(Struct, kw_only=True):
    """The schema of a `response_format`."""

    schema: dict[str, Raw] | None = None
    name: str | None = None


class ResponseFormat(Struct, kw_only=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    # TGI's form: where huggingface_hub's client, given an address, puts the schema of a `json_schema`.
    value: str | dict[str, Raw] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to say what the answer must match: one of these."""

    json: str | dict[str, Raw] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class StreamOptions(Struct, kw_only=True):
    """What a stream tells besides text."""

    include_usage: Annotated[bool | None, told("a last chunk with the usage")] = None
    continuous_usage_stats: Annotated[bool | None, told("usage on every chunk")] = None


class OpenAIFields(CommonFields, kw_only=True):
    """What completions and chat completions share."""

    model: Annotated[str | None, told("its served name; dummy, tgi, empty and absent are the one there is")] = None
    n: Annotated[NumAnswers | None, told("answers to each prompt, which is computed once")] = None
    stream: Annotated[bool | None, told("answer with server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, told("only with stream")] = None
    prompt_logprobs: Annotated[NumLogprobs | None, told("logprob of each prompt token, and the likeliest there")] = None
    truncate_prompt_tokens: Annotated[Count | None, told("keep the last so many tokens of the prompt")] = None
    response_format: Annotated[ResponseFormat | None, told("any JSON object, or one of a schema")] = None
    structured_outputs: Annotated[StructuredOutputs | None, told("json, json_object, regex, choice or grammar")] = None
    guided_json: Annotated[str | dict[str, Raw] | None, told("older name of structured_outputs.json")] = None
    guided_regex: Annotated[str | None, told("older name of structured_outputs.regex")] = None
    guided_choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None, told("older name of structured_outputs.choice")
    ] = None
    guided_grammar: Annotated[str | None, told("older name of structured_outputs.grammar")] = None
    use_beam_search: Annotated[bool | None, told("refused: there is no beam search")] = None
    prompt_embeds: Annotated[Any, told("refused: prompts are text or token ids")] = None
    logits_processors: Annotated[Any, told("refused: no code comes from requests")] = None

    @property
    def tells_usage(self) -> bool:
        return self.stream_options is not None and bool(
            self.stream_options.include_usage or self.stream_options.continuous_usage_stats
        )

    @property
    def tells_usage_always(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def grammar(self) -> Grammar | None:
        """What the answer must match, said in either way. Raises InvalidRequest."""
        asked = [*self._of_response_format(), *self._of_structured_outputs(), *self._of_older_fields()]
        if len(asked) > 1:
            names = " and ".join(grammar.param for grammar in asked)
            raise InvalidRequest(f"{names} are given; an answer follows one of them", param=asked[1].param)
        return asked[0] if asked else None

    def _of_response_format(self) -> list[Grammar]:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return []
        if asked.value is not None:
            kind = GrammarKind.REGEX if asked.type == "regex" else GrammarKind.JSON_SCHEMA
            return [Grammar(kind, _as_text(asked.value), "response_format.value")]
        if asked.type == "regex":
            raise InvalidRequest("response_format: a regex needs a value", param="response_format.value")
        if asked.type in ("json_object", "json"):
            return [Grammar(GrammarKind.JSON, "", "response_format")]
        if asked.json_schema is None or asked.json_schema.schema is None:
            raise InvalidRequest(
                "response_format: json_schema needs a schema", param="response_format.json_schema.schema"
            )
        text = msgspec.json.encode(asked.json_schema.schema).decode()
        return [Grammar(GrammarKind.JSON_SCHEMA, text, "response_format.json_schema.schema")]

    def _of_structured_outputs(self) -> list[Grammar]:
        asked, param = self.structured_outputs, "structured_outputs"
        if asked is None:
            return []
        found = []
        if asked.json is not None:
            found.append(Grammar(GrammarKind.JSON_SCHEMA, _as_text(asked.json), f"{param}.json"))
        if asked.json_object:
            found.append(Grammar(GrammarKind.JSON, "", f"{param}.json_object"))
        if asked.regex is not None:
            found.append(Grammar(GrammarKind.REGEX, asked.regex, f"{param}.regex"))
        if asked.choice is not None:
            found.append(Grammar(GrammarKind.CHOICE, msgspec.json.encode(asked.choice).decode(), f"{param}.choice"))
        if asked.grammar is not None:
            found.append(Grammar(GrammarKind.EBNF, asked.grammar, f"{param}.grammar"))
        if not found:
            raise InvalidRequest(
                f"{param} names nothing to follow; it takes json, json_object, regex, choice or grammar", param=param
            )
        return found

    def _of_older_fields(self) -> list[Grammar]:
        found = []
        if self.guided_json is not None:
            found.append(Grammar(GrammarKind.JSON_SCHEMA, _as_text(self.guided_json), "guided_json"))
        if self.guided_regex is not None:
            found.append(Grammar(GrammarKind.REGEX, self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            found.append(Grammar(GrammarKind.CHOICE, msgspec.json.encode(self.guided_choice).decode(), "guided_choice"))
        if self.guided_grammar is not None:
            found.append(Grammar(GrammarKind.EBNF, self.guided_grammar, "guided_grammar"))
        return found

    def shared(self) -> dict[str, Any]:
        """These fields as a GenerationRequest has them. Raises InvalidRequest."""
        for name in ("use_beam_search", "prompt_embeds", "logits_processors"):
            if getattr(self, name):  # null, false and empty are the same as leaving it out
                raise InvalidRequest(f"{name} is not supported by this server; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for streams; set stream to true", param="stream_options")
        return {
            "grammar": self.grammar(),
            "n": self.n or 1,
            "prompt_logprobs": self.prompt_logprobs,
            "truncate": self.truncate_prompt_tokens,
            **self.common(),
        }


def _as_text(schema: str | dict[str, Raw]) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


# -- completions -------------------------------------------------------------------------------------------------------


class CompletionRequest(OpenAIFields, kw_only=True):
    """The body of /v1/completions."""

    # A union may hold one array type, so what the list holds is looked at below.
    prompt: Annotated[str | list[str | TokenId | list[TokenId]], told("a text, token ids, or a list of either")]
    max_tokens: Annotated[Bound | None, told("of the answer; 16 by default, and 0 only with echo")] = None
    best_of: Annotated[NumAnswers | None, told("answers computed, of which the n likeliest are given")] = None
    logprobs: Annotated[NumLogprobs | None, told("of each token, and of so many of the likeliest")] = None
    echo: Annotated[bool | None, told("put the prompt before the answer")] = None
    add_special_tokens: Annotated[bool | None, told("those the model expects around a text; true by default")] = None
    suffix: Annotated[str | None, told("refused: the models cannot fill in")] = None

    def read(self) -> GenerationRequest:
        """What is asked for. Raises InvalidRequest."""
        if self.suffix:
            raise InvalidRequest("suffix is not supported", param="suffix")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens = 0 asks for nothing; with echo it gives the prompt back", param="max_tokens"
            )
        shared = self.shared()
        best_of = at_least(self.best_of, shared["n"])
        if self.stream and best_of > shared["n"]:
            raise InvalidRequest(
                f"best_of = {best_of}: which of them is best is known only at the end; leave out stream",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            shared["prompt_logprobs"] = max(self.logprobs, shared["prompt_logprobs"] or 0)
        return GenerationRequest(
            prompts=self._prompts(),
            # The step that computes the prompt samples a token anyway: for `max_tokens` 0 it is computed and not told.
            max_tokens=16 if self.max_tokens is None else max(self.max_tokens, 1),
            best_of=best_of,
            logprobs=self.logprobs,
            **shared,
        )

    def _prompts(self) -> list[Prompt]:
        special = self.add_special_tokens is not False
        if isinstance(self.prompt, str):
            return [Prompt(self.prompt, "prompt", special)]
        if not self.prompt:
            raise InvalidRequest("prompt is an empty list", param="prompt")
        items: list[Any] = list(self.prompt)
        kinds = set(map(type, items))
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes texts and token ids; give one kind", param="prompt")
        if kinds == {int}:
            return [Prompt(items, "prompt")]
        if len(items) > MAX_PROMPTS:
            raise InvalidRequest(f"{len(items)} prompts; at most {MAX_PROMPTS} are looked at", param="prompt")
        return [Prompt(item, f"prompt[{index}]", special) for index, item in enumerate(items)]


class CompletionLogprobs(Struct):
    """Four lists of one length, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]  # where each token begins in the text, in characters


class PromptTokensDetails(Struct):
    """What was special about the prompt's tokens."""

    cached_tokens: int


class OpenAIUsage(Struct):
    """What a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    """vLLM's entry for a token at a position of the prompt."""

    logprob: float
    decoded_token: str


class CompletionChoice(Struct):
    """One answer, or what a chunk has of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET


class CompletionResponse(Struct):
    """The answer, and with `stream` each chunk of it."""

    id: str
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage | UnsetType | None = UNSET
    object: str = "text_completion"
    system_fingerprint: str | None = None


# -- chat --------------------------------------------------------------------------------------------------------------


class ContentPart(Struct, kw_only=True):
    """A piece of a message; only text is understood."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None


class ChatMessage(Struct, kw_only=True):
    """One message of the conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None  # of earlier turns, for templates that know them
    tool_call_id: str | None = None

    def read(self, index: int) -> dict[str, Any]:
        """As chat templates take it. Raises InvalidRequest for pictures and the like."""
        content = self.content
        if isinstance(content, list):
            for part in content:
                if part.type not in ("text", "input_text", "refusal") or part.text is None:
                    raise InvalidRequest(
                        f"messages[{index}].content has a part of type {part.type!r}; this server takes text",
                        param=f"messages[{index}].content",
                    )
            content = "".join(part.text or "" for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        told = {name: getattr(self, name) for name in ("name", "tool_calls", "tool_call_id")}
        return message | {name: value for name, value in told.items() if value is not None}


class ChatCompletionRequest(OpenAIFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[Count | None, told("of the answer; as many as the context holds by default")] = (
        None
    )
    max_tokens: Annotated[Count | None, told("the older name of max_completion_tokens")] = None
    logprobs: Annotated[bool | None, told("of each token")] = None
    top_logprobs: Annotated[NumLogprobs | None, told("so many of the likeliest beside each token")] = None
    add_generation_prompt: Annotated[bool | None, told("begin the assistant's turn; true by default")] = None
    continue_final_message: Annotated[bool | None, told("go on with the last message instead of answering it")] = None
    chat_template: Annotated[str | None, told("refused unless the server runs with --trust-request-chat-template")] = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, told("more variables for the chat template")] = None
    tools: Annotated[Any, told("refused: tools are not supported")] = None
    tool_choice: Annotated[Any, told("refused: but for auto and none, tools are not supported")] = None
    functions: Annotated[Any, told("refused: tools are not supported")] = None
    modalities: Annotated[list[str] | None, told("only text")] = None

    def check(self) -> None:
        """Raise InvalidRequest for what is not served, before the conversation is rendered."""
        for name in ("tools", "functions", "tool_choice"):
            value = getattr(self, name)
            if value and value not in ("auto", "none"):
                raise InvalidRequest(f"{name}: tools are not supported by this server; leave it out", param=name)
        if set(self.modalities or ()) - {"text"}:
            raise InvalidRequest(f"modalities = {self.modalities}: this server answers with text", param="modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")

    def read(self, rendered: str) -> GenerationRequest:
        """What is asked for, given the conversation as text. Raises InvalidRequest."""
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        shared = self.shared()
        return GenerationRequest(
            prompts=[Prompt(rendered, "messages", add_special_tokens=False)],  # the template brings its own
            max_tokens=max_tokens,
            best_of=shared["n"],
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **shared,
        )


class TopLogprob(Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    """One token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Every token of the answer."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatAnswer(Struct):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunkChoice(Struct):
    """What a chunk has of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletionResponse(Struct):
    """The answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """One chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: OpenAIUsage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET


def finish_reason(reason: FinishReason, stop_reason: str | int | None) -> tuple[str, str | int | None]:
    """OpenAI's word for how an answer ended, and vLLM's `stop_reason`."""
    if reason is FinishReason.DEADLINE:
        return "abort", "deadline"
    return str(reason), stop_reason


# -- models ------------------------------------------------------------------------------------------------------------


class Model(Struct):
    """One model that is served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "servekit"
    root: str | None = None
    parent: None = None


class ModelList(Struct):
    """All of them."""

    data: list[Model]
    object: str = "list"
