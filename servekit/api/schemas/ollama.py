"""Define Ollama's wire format: /api/chat, /api/generate, /api/show and the lists of models.

Each body is translated to a chat in OpenAI's format, or to a prompt. These routes ignore unknown fields, as Ollama
does; a known field that would change the answer and is not supported (`images`, `template`, `context`) is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from servekit.api.schemas.common_fields import CommonFields, NumLogprobs, described
from servekit.api.schemas.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    ChatLogprob,
    ChatMessage,
    NamedTool,
    Tool,
)
from servekit.errors import InvalidRequest
from servekit.requests.generation import GenerationRequest, Grammar, GrammarKind, Prompt

# -- bodies ------------------------------------------------------------------------------------------------------------


class OllamaOptions(CommonFields, kw_only=True):
    """How to generate the answer: Ollama's options, and servekit's further ones."""

    num_predict: Annotated[
        Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None,
        described("maximum length of the answer; default, and for 0 and less: what the context holds"),
    ] = None
    repeat_penalty: Annotated[
        Annotated[float, Meta(gt=0.0, le=10.0)] | None, described("Ollama's name of repetition_penalty")
    ] = None
    num_ctx: Annotated[int | None, described("ignored: the server has one context length for all requests")] = None
    mirostat: Annotated[int | None, described("refused unless 0: this sampler is not supported")] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        described("whether the answer calls functions, as in /v1/chat/completions"),
    ] = None

    def common(self, do_sample: bool | None = None) -> dict[str, Any]:
        if self.mirostat:
            raise InvalidRequest(
                "options.mirostat is not supported by this server; leave it out", param="options.mirostat"
            )
        return super().common(do_sample)

    @property
    def max_tokens(self) -> int | None:
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    def common_fields(self) -> dict[str, Any]:
        """Return the fields that OpenAI's bodies have, too, by name."""
        fields = {name: getattr(self, name) for name in CommonFields.__struct_fields__}
        if self.repeat_penalty is not None:
            fields["repetition_penalty"] = self.repeat_penalty
        if self.seed == -1:  # Ollama's value for a random seed
            fields["seed"] = None
        return fields


class OllamaFunctionCall(Struct, kw_only=True):
    """The function of a call, and its arguments."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(Struct, kw_only=True):
    """One call."""

    function: OllamaFunctionCall


class OllamaMessage(Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None  # of an earlier turn; most templates leave it out
    images: Annotated[list[Raw] | None, described("refused: this server supports text only")] = None
    tool_calls: list[dict[str, Any]] | None = None  # of earlier turns, for chat templates that use them
    tool_name: str | None = None  # the function whose result this message is
    tool_call_id: str | None = None

    def for_template(self, index: int) -> dict[str, Any]:
        """Return the message as chat templates expect it. Raises InvalidRequest for images."""
        if self.images:
            raise _images_are_not_supported(f"messages[{index}].images")
        message = ChatMessage(
            role=self.role,
            content=self.content,
            name=self.tool_name,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.thinking,
        )
        return message.for_template(index)


def _images_are_not_supported(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: this server supports text only; leave the images out", param=param)


class _Chat(ChatCompletionRequest, kw_only=True):
    """A chat in OpenAI's format, but for what the answer must match."""

    own_grammar: Grammar | None = None

    def grammar(self) -> Grammar | None:
        return self.own_grammar


class OllamaFields(Struct, kw_only=True):
    """The fields that chat and generate share."""

    model: Annotated[str, described("the served model's name, with or without the tag :latest")]
    options: OllamaOptions | None = None
    format: Annotated[
        str | dict[str, Raw] | None, described("'json' for any JSON object, or the JSON schema of the answer")
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None,
        described("whether to reason, and how much, for models that can"),
    ] = None
    stream: Annotated[bool | None, described("send the answer in lines of JSON; default: true")] = None
    logprobs: Annotated[bool | None, described("return the logprob of each token")] = None
    top_logprobs: Annotated[NumLogprobs | None, described("return this many likeliest tokens with each token")] = None
    keep_alive: Annotated[Any, described("ignored: the model stays loaded")] = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def shows_thinking(self) -> bool:
        return self.think is not False

    def grammar(self) -> Grammar | None:
        """Return what the answer must match. Raises InvalidRequest."""
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(self.format).decode(), "format")
        if self.format != "json":
            raise InvalidRequest(
                f"format = {self.format[:40]!r}: it takes 'json', or a JSON schema as an object", param="format"
            )
        return Grammar(GrammarKind.JSON, "", "format")

    def as_chat(self, messages: list[ChatMessage], tools: list[Tool] | None = None) -> ChatCompletionRequest:
        """Return the request as a chat in OpenAI's format. Raises InvalidRequest."""
        options = self.options or OllamaOptions()
        options.common()  # raises for what is not supported
        return _Chat(
            messages=messages,
            max_completion_tokens=options.max_tokens,
            logprobs=self.logprobs or bool(self.top_logprobs),
            top_logprobs=self.top_logprobs,
            tools=tools,
            tool_choice=options.tool_choice,
            reasoning_effort="none" if self.think is False else self.think if isinstance(self.think, str) else None,
            chat_template_kwargs={"enable_thinking": True, "thinking": True} if self.think is True else None,
            own_grammar=self.grammar(),
            **options.common_fields(),
        )


class OllamaChatRequest(OllamaFields, kw_only=True):
    """The body of /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None, described("functions that the model may call")
    ] = None

    def chat(self) -> ChatCompletionRequest:
        """Return the request as a chat in OpenAI's format, without its messages. Raises InvalidRequest."""
        return self.as_chat([ChatMessage(role="user")], [_with_its_parameters_only(tool) for tool in self.tools or ()])

    def check(self) -> None:
        """Raise InvalidRequest for what no type can express, before the conversation is rendered."""
        self.chat().check()

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them. Raises InvalidRequest for images."""
        return [message.for_template(index) for index, message in enumerate(self.messages)]

    def drop_conversation(self) -> None:
        """Remove the messages: what they say was taken out."""
        self.messages = []


def _with_its_parameters_only(tool: Tool) -> Tool:
    """Return a tool whose calls have the parameters that it names. Ollama's Python client cannot say so itself."""
    parameters = tool.function.parameters
    if not parameters or "additionalProperties" in parameters:
        return tool
    closed = {**parameters, "additionalProperties": Raw(b"false")}
    return Tool(type="function", function=msgspec.structs.replace(tool.function, parameters=closed))


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: Annotated[
        str | None, described("text that comes after the answer, for models whose tokenizer has tokens for it")
    ] = None
    system: Annotated[str | None, described("the system's message before the prompt")] = None
    raw: Annotated[bool | None, described("do not put the prompt into the model's chat template")] = None
    images: Annotated[list[Raw] | None, described("refused: this server supports text only")] = None
    template: Annotated[str | None, described("refused: the model's own chat template is used")] = None
    context: Annotated[list[int] | None, described("refused: send the conversation to /api/chat")] = None

    def check(self) -> None:
        """Raise InvalidRequest for what is not supported."""
        if self.images:
            raise _images_are_not_supported("images")
        if self.template:
            raise InvalidRequest(
                "template is not supported: the model's own chat template is used; leave it out, or send the whole "
                "prompt with raw = true",
                param="template",
            )
        if self.context:
            raise InvalidRequest(
                "context is not supported by this server; send the conversation to /api/chat", param="context"
            )
        if self.raw and self.system:
            raise InvalidRequest(
                "raw = true takes the prompt as it is, without a system message; put it into the prompt", param="system"
            )
        self.chat().check()

    def chat(self) -> ChatCompletionRequest:
        """Return the request as a chat in OpenAI's format, without its messages. Raises InvalidRequest."""
        return self.as_chat([ChatMessage(role="user")])

    def conversation(self) -> list[dict[str, Any]]:
        """Return the prompt as a conversation, as chat templates expect it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt or ""}]

    def drop_conversation(self) -> None:
        """Remove the texts: what they say was taken out."""
        self.prompt = self.system = None

    def to_generation_request(self, prompt: str) -> GenerationRequest:
        """Return the request for the prompt as it is, without a chat template. Raises InvalidRequest."""
        rest = self.chat().to_generation_request("")
        return msgspec.structs.replace(rest, prompts=[Prompt(prompt, "prompt")], suffix=self.suffix or None)


class OllamaShowRequest(Struct, kw_only=True):
    """The body of /api/show."""

    model: str | None = None
    name: Annotated[str | None, described("older name of model")] = None


# -- answers -----------------------------------------------------------------------------------------------------------


class OllamaError(Struct):
    """The body of every error answer, and the last line of a stream that fails."""

    error: str


class OllamaAnswerMessage(Struct):
    """The assistant's message, or the part of it in a line."""

    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """What answers of chat and generate share. The fields from `done_reason` on come with the end. Times are in ns."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class OllamaChatResponse(OllamaAnswer, kw_only=True):
    """The answer of /api/chat, or a line of its stream."""

    message: OllamaAnswerMessage


class OllamaGenerateResponse(OllamaAnswer, kw_only=True):
    """The answer of /api/generate, or a line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


# -- models ------------------------------------------------------------------------------------------------------------


class OllamaModelDetails(Struct, kw_only=True):
    """What kind of model it is."""

    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class OllamaModel(Struct, kw_only=True):
    """The served model in /api/tags, and in /api/ps, whose fields come last."""

    name: str
    model: str
    size: int  # bytes of the weights
    digest: str
    details: OllamaModelDetails
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Struct):
    """All served models."""

    models: list[OllamaModel]


class OllamaShowResponse(Struct, kw_only=True):
    """A description of the served model."""

    details: OllamaModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    parameters: str
    modified_at: str
    modelfile: str = ""
    template: str = ""  # Ollama's are written in another language than those of Hugging Face's models
    license: str = ""


class OllamaVersion(Struct):
    """The version of Ollama whose API this is, which clients compare with the one that they need."""

    version: str
    servekit: str
