"""Define OpenAI's wire format: /v1/completions, /v1/chat/completions and /v1/models, with vLLM's extensions.

These routes ignore unknown fields, because clients and load tools send many. A known field that would change the answer
and is not supported (`functions`, `prompt_embeds`) is refused.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from servekit.api.schemas.common_fields import (
    MAX_PROMPTS,
    Bound,
    CommonFields,
    Count,
    NumAnswers,
    NumLogprobs,
    TokenId,
    described,
    num_computed,
)
from servekit.api.schemas.json_body import is_shallow
from servekit.errors import InvalidRequest
from servekit.parsing.chat_format import AnswerFormat, Function, ToolUse
from servekit.requests.generation import Chat, GenerationRequest, Grammar, GrammarKind, Prompt
from servekit.scheduler.explanation import Explanation
from servekit.scheduler.sequence import FinishReason

MAX_MESSAGES = 2**14  # far more than a context holds
MAX_TOOLS = 128

# -- fields of both routes ---------------------------------------------------------------------------------------------


class JsonSchema(Struct, kw_only=True):
    """The schema of a `response_format`."""

    schema: dict[str, Raw] | None = None
    name: str | None = None


class ResponseFormat(Struct, kw_only=True):
    """The format that the answer must have."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    # TGI's form. huggingface_hub's client puts the schema of a `json_schema` here if it is given a URL.
    value: str | dict[str, Raw] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field for what the answer must match: exactly one of these."""

    json: str | dict[str, Raw] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class StreamOptions(Struct, kw_only=True):
    """What a stream contains besides text."""

    include_usage: Annotated[bool | None, described("send a last chunk with the usage")] = None
    continuous_usage_stats: Annotated[
        bool | None, described("send the usage in every chunk, too; only with include_usage")
    ] = None


class Prediction(Struct, kw_only=True):
    """OpenAI's predicted output: a text that the answer may repeat, such as the file that it edits."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class OpenAIFields(CommonFields, kw_only=True):
    """The fields that completions and chat completions share."""

    model: Annotated[
        str | None, described("the served model's name; dummy, tgi, empty and absent mean that model, too")
    ] = None
    n: Annotated[NumAnswers | None, described("number of answers to each prompt; the prompt is computed once")] = None
    stream: Annotated[bool | None, described("send the answer as server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, described("options of a stream; only with stream")] = None
    prompt_logprobs: Annotated[
        NumLogprobs | None, described("return the logprob of each prompt token, and of this many likeliest tokens")
    ] = None
    return_token_ids: Annotated[
        bool | None,
        described("return the ids of the tokens of answer and prompt: token_ids and prompt_token_ids"),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, described("name tokens in logprobs by their ids, token_id:293, instead of their texts")
    ] = None
    truncate_prompt_tokens: Annotated[
        Count | None, described("keep only this many tokens of the prompt, the last ones")
    ] = None
    response_format: Annotated[
        ResponseFormat | None, described("make the answer a JSON object, or one that matches a schema")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        described("grammar that the answer must match: json, json_object, regex, choice or grammar"),
    ] = None
    prediction: Annotated[
        Prediction | None,
        described("text that the answer may repeat: with --speculative ngram it makes drafts; else it is ignored"),
    ] = None
    guided_json: Annotated[str | dict[str, Raw] | None, described("older name of structured_outputs.json")] = None
    guided_regex: Annotated[str | None, described("older name of structured_outputs.regex")] = None
    guided_choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None, described("older name of structured_outputs.choice")
    ] = None
    guided_grammar: Annotated[str | None, described("older name of structured_outputs.grammar")] = None
    explain: Annotated[bool | None, described("return where the request's time went (docs/explain.md)")] = None
    use_beam_search: Annotated[bool | None, described("refused: beam search is not supported")] = None
    prompt_embeds: Annotated[Any, described("refused: prompts are text or token ids")] = None
    logits_processors: Annotated[Any, described("refused: requests cannot bring code")] = None
    logprob_token_ids: Annotated[Any, described("refused: logprobs are those of the likeliest tokens")] = None
    repetition_detection: Annotated[Any, described("refused: an answer ends by stop, EOS or its maximum length")] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, described("left, for truncate_prompt_tokens; right is refused")
    ] = None

    @property
    def sends_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def sends_usage_always(self) -> bool:
        return self.sends_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def grammar(self) -> Grammar | None:
        """Return what the answer must match, from whichever field has it. Raises InvalidRequest."""
        grammars = [*self._from_response_format(), *self._from_structured_outputs(), *self._from_older_fields()]
        if len(grammars) > 1:
            names = " and ".join(grammar.param for grammar in grammars)
            raise InvalidRequest(f"{names} are both set; send one of them", param=grammars[1].param)
        return grammars[0] if grammars else None

    def _from_response_format(self) -> list[Grammar]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return []
        if wanted.value is not None:
            kind = GrammarKind.REGEX if wanted.type == "regex" else GrammarKind.JSON_SCHEMA
            return [Grammar(kind, _as_text(wanted.value), "response_format.value")]
        if wanted.type == "regex":
            raise InvalidRequest(
                "response_format: type 'regex' needs the expression in value", param="response_format.value"
            )
        if wanted.type in ("json_object", "json"):
            return [Grammar(GrammarKind.JSON, "", "response_format")]
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise InvalidRequest(
                "response_format: type 'json_schema' needs a schema in json_schema.schema",
                param="response_format.json_schema.schema",
            )
        text = msgspec.json.encode(wanted.json_schema.schema).decode()
        return [Grammar(GrammarKind.JSON_SCHEMA, text, "response_format.json_schema.schema")]

    def _from_structured_outputs(self) -> list[Grammar]:
        outputs, param = self.structured_outputs, "structured_outputs"
        if outputs is None:
            return []
        found = []
        if outputs.json is not None:
            found.append(Grammar(GrammarKind.JSON_SCHEMA, _as_text(outputs.json), f"{param}.json"))
        if outputs.json_object:
            found.append(Grammar(GrammarKind.JSON, "", f"{param}.json_object"))
        if outputs.regex is not None:
            found.append(Grammar(GrammarKind.REGEX, outputs.regex, f"{param}.regex"))
        if outputs.choice is not None:
            found.append(Grammar(GrammarKind.CHOICE, msgspec.json.encode(outputs.choice).decode(), f"{param}.choice"))
        if outputs.grammar is not None:
            found.append(Grammar(GrammarKind.EBNF, outputs.grammar, f"{param}.grammar"))
        if not found:
            raise InvalidRequest(f"{param} is empty; it needs json, json_object, regex, choice or grammar", param=param)
        return found

    def _from_older_fields(self) -> list[Grammar]:
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
        """Return these fields as arguments of GenerationRequest. Raises InvalidRequest."""
        self._refuse_unsupported(
            "use_beam_search", "prompt_embeds", "logits_processors", "logprob_token_ids", "repetition_detection"
        )
        if self.truncation_side == "right":
            raise InvalidRequest(
                "truncation_side = 'right' is not supported by this server: truncate_prompt_tokens keeps the last "
                "tokens; shorten the text, or leave it out",
                param="truncation_side",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options needs stream = true; set stream, or leave stream_options out", param="stream_options"
            )
        return {
            "grammar": self.grammar(),
            "n": self.n or 1,
            "returns_token_ids": bool(self.return_token_ids),
            "prompt_logprobs": self.prompt_logprobs,
            "truncate": self.truncate_prompt_tokens,
            "prediction": None if self.prediction is None else self.prediction.text,
            "explain": bool(self.explain),
            **self.common(),
        }

    def _refuse_unsupported(self, *names: str) -> None:
        for name in names:
            if getattr(self, name):  # null, false and empty mean that it is not used
                raise InvalidRequest(f"{name} is not supported by this server; leave it out", param=name)


def _as_text(schema: str | dict[str, Raw]) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


# -- completions -------------------------------------------------------------------------------------------------------


class CompletionRequest(OpenAIFields, kw_only=True):
    """The body of /v1/completions."""

    # msgspec allows one array type in a union, so `_prompts` checks what the list contains.
    prompt: Annotated[str | list[str | TokenId | list[TokenId]], described("a text, token ids, or a list of either")]
    max_tokens: Annotated[Bound | None, described("maximum length of the answer; default: 16; 0 only with echo")] = None
    best_of: Annotated[NumAnswers | None, described("number of answers to compute; the n likeliest are returned")] = (
        None
    )
    logprobs: Annotated[
        NumLogprobs | None, described("return the logprob of each token, and of this many likeliest tokens")
    ] = None
    echo: Annotated[bool | None, described("put the prompt before the answer")] = None
    add_special_tokens: Annotated[
        bool | None, described("add the special tokens that the model expects around a text; default: true")
    ] = None
    suffix: Annotated[
        str | None, described("text that comes after the answer, for models whose tokenizer has tokens for it")
    ] = None

    def to_generation_request(self) -> GenerationRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise InvalidRequest(f"suffix cannot be combined with {name}; leave one of them out", param="suffix")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens = 0 generates nothing; it is allowed only with echo, which returns the prompt",
                param="max_tokens",
            )
        shared = self.shared()
        best_of = num_computed(self.best_of, shared["n"])
        if self.stream and best_of > shared["n"]:
            raise InvalidRequest(
                f"best_of = {best_of} cannot be streamed: the best answer is known only when all have ended; "
                "leave out stream",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            shared["prompt_logprobs"] = max(self.logprobs, shared["prompt_logprobs"] or 0)
        return GenerationRequest(
            prompts=self._prompts(),
            # The step that computes the prompt samples a token anyway. For `max_tokens` 0 it is not returned.
            max_tokens=16 if self.max_tokens is None else max(self.max_tokens, 1),
            best_of=best_of,
            logprobs=self.logprobs,
            suffix=self.suffix or None,
            **shared,
        )

    def _prompts(self) -> list[Prompt]:
        special = self.add_special_tokens is not False
        prompt: Any = self.prompt  # of a large body, token ids are arrays
        if isinstance(prompt, str | array):
            return [Prompt(prompt, "prompt", special)]
        if not prompt:
            raise InvalidRequest("prompt is an empty list; it needs at least one prompt", param="prompt")
        kinds = set(map(type, prompt))
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes texts and token ids; send one kind", param="prompt")
        if kinds == {int}:
            return [Prompt(prompt, "prompt", special)]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(prompt)} prompts; the limit is {MAX_PROMPTS}", param="prompt")
        return [Prompt(item, f"prompt[{index}]", special) for index, item in enumerate(prompt)]


class CompletionLogprobs(Struct):
    """Four lists of one length, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]  # where each token begins in the text, in characters


class PromptTokensDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Details of the answers' tokens; each is absent where there is nothing to tell."""

    # drafts of speculative decoding that became tokens of the answers
    accepted_prediction_tokens: int | UnsetType = UNSET
    # other drafts that were verified; OpenAI bills these, here they cost nothing
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET  # with the marker that ends the reasoning


class OpenAIUsage(Struct):
    """The number of tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(Struct):
    """vLLM's entry for a token at a position of the prompt."""

    logprob: float
    decoded_token: str


class CompletionChoice(Struct):
    """One answer, or the part of it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct):
    """The answer, and with `stream` each chunk of it."""

    id: str
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage | UnsetType | None = UNSET
    explanation: Explanation | UnsetType = UNSET  # with `explain`; of a stream, in its last chunk
    object: str = "text_completion"
    system_fingerprint: str | None = None


# -- chat --------------------------------------------------------------------------------------------------------------


class ContentPart(Struct, kw_only=True):
    """A part of a message; only text is supported."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None


class ChatMessage(Struct, kw_only=True):
    """One message of the conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None  # of earlier turns, for chat templates that use them
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier turn; most templates leave it out
    reasoning: str | None = None  # the same; vLLM's name

    def for_template(self, index: int) -> dict[str, Any]:
        """Return the message as chat templates expect it. Raises InvalidRequest for images, audio and the like."""
        content = self.content
        if isinstance(content, list):
            for part in content:
                if part.type not in ("text", "input_text", "refusal") or part.text is None:
                    raise InvalidRequest(
                        f"messages[{index}].content has a part of type {part.type!r}; this server supports text only",
                        param=f"messages[{index}].content",
                    )
            content = "".join(part.text or "" for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        optional = {name: getattr(self, name) for name in ("name", "tool_call_id")}
        message |= {name: value for name, value in optional.items() if value is not None}
        if self.tool_calls is not None:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
            if not (content and self.tool_calls):  # the template of gpt-oss takes one of them
                message["thinking"] = reasoning
        return message


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object: clients send a text with JSON, and templates expect an object.

    A text that is no JSON object stays: the model wrote it, and its client sends back what it got.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"] or "{}"
    try:
        arguments = msgspec.json.decode(text)
        msgspec.msgpack.encode(arguments)  # as which it goes to the template: it has no integers of more than 64 bits
    except (msgspec.DecodeError, RecursionError, OverflowError):
        return call
    if not is_shallow(text.encode("utf-8", "replace")):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


class FunctionDefinition(Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Raw] | None = None  # the JSON schema of its arguments
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the function as chat templates expect it."""
        parameters = msgspec.json.decode(_parameters_of(self))
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {name: value for name, value in described.items() if value is not None}


def _parameters_of(function: FunctionDefinition) -> str:
    """Return the JSON schema of a function's arguments. A function without any has none."""
    if not function.parameters:
        return Function("").parameters
    return msgspec.json.encode(function.parameters).decode()


class Tool(Struct, kw_only=True):
    """A tool, which is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(Struct, kw_only=True):
    """The function that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(OpenAIFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[
        Count | None, described("maximum length of the answer; default: what the context holds")
    ] = None
    max_tokens: Annotated[Count | None, described("older name of max_completion_tokens")] = None
    logprobs: Annotated[bool | None, described("return the logprob of each token")] = None
    top_logprobs: Annotated[NumLogprobs | None, described("return this many likeliest tokens with each token")] = None
    add_generation_prompt: Annotated[
        bool | None, described("begin the assistant's turn after the last message; default: true")
    ] = None
    continue_final_message: Annotated[bool | None, described("continue the last message instead of answering it")] = (
        None
    )
    chat_template: Annotated[
        str | None, described("chat template for this request; needs --trust-request-chat-template")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("additional variables for the chat template")] = (
        None
    )
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None, described("functions that the model may call")
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        described("whether the answer calls functions: auto lets the model choose; default: auto, if there are tools"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("the answer may have several calls; default: true")] = None
    reasoning_effort: Annotated[
        Annotated[str, Meta(max_length=32)] | None,
        described("how much to reason, for chat templates that know it; none: not at all"),
    ] = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        described("end the reasoning after this many tokens; -1 is off"),
    ] = None
    thinking_budget: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None, described("another name of thinking_token_budget")
    ] = None
    include_reasoning: Annotated[
        bool | None, described("return the reasoning, in reasoning_content; default: true")
    ] = None
    functions: Annotated[Any, described("refused: older name of tools")] = None
    function_call: Annotated[Any, described("refused: older name of tool_choice; auto and none are ignored")] = None
    modalities: Annotated[list[str] | None, described("only text is supported")] = None
    echo: Annotated[Any, described("refused: an answer does not repeat the last message")] = None
    documents: Annotated[Any, described("refused: put them into messages, or into chat_template_kwargs")] = None
    web_search_options: Annotated[Any, described("refused: the server searches nothing")] = None

    def check(self) -> None:
        """Raise InvalidRequest for features that are not supported, before the conversation is rendered."""
        for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
            value = getattr(self, name)
            if value and value not in ("auto", "none"):
                raise InvalidRequest(f"{name} is not supported by this server; send {newer}", param=name)
        self._refuse_unsupported("echo", "documents", "web_search_options")
        self._check_tools()
        if set(self.modalities or ()) - {"text"}:
            raise InvalidRequest(
                f"modalities = {self.modalities}: this server generates text only; leave it out", param="modalities"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InvalidRequest(
                    f"tools has two functions {name!r}; give each one a name of its own", param=f"tools[{index}]"
                )
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice names the function {choice.function.name[:128]!r}, which tools does not have; add it, or "
                "choose another one",
                param="tool_choice",
            )
        if choice == "required" and not names:
            raise InvalidRequest("tool_choice = 'required' needs tools; send some", param="tool_choice")

    def tool_use(self) -> ToolUse | None:
        """Return which functions the answers may call; None if they call none."""
        choice = self.tool_choice
        if not self.tools or choice == "none":
            return None
        wanted = choice.function.name if isinstance(choice, NamedTool) else None
        functions = tuple(
            Function(each.name, _parameters_of(each), each.strict is True)
            for each in (tool.function for tool in self.tools)
            if wanted is None or each.name == wanted
        )
        is_parallel = self.parallel_tool_calls is not False and wanted is None
        return ToolUse(functions, wanted is not None or choice == "required", is_parallel)

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates expect them."""
        return [{"type": tool.type, "function": tool.function.for_template()} for tool in self.tools or ()] or None

    def template_variables(self) -> dict[str, Any]:
        """Return additional variables for the chat template; those of no reasoning have Qwen's and DeepSeek's names."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables |= {"enable_thinking": False, "thinking": False}
        return variables | (self.chat_template_kwargs or {})

    @property
    def max_reasoning_tokens(self) -> int | None:
        """The most tokens of reasoning; None if they are not bounded."""
        budget = self.thinking_budget if self.thinking_token_budget is None else self.thinking_token_budget
        return None if budget is None or budget < 0 else budget

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them. Raises InvalidRequest for images, audio and the like."""
        return [message.for_template(index) for index, message in enumerate(self.messages)]

    def drop_conversation(self) -> None:
        """Replace the messages by one that is short: what they say was taken out."""
        self.messages = [ChatMessage(role="user")]

    def to_generation_request(self, rendered: str, answer_format: AnswerFormat | None = None) -> GenerationRequest:
        """Return the request in the form that all APIs share, for a rendered conversation. Raises InvalidRequest.

        `answer_format` is that of the answers to it, where that is known.
        """
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        shared = self.shared()
        if answer_format is not None:
            shared["grammar"] = answer_format.grammar
        return GenerationRequest(
            prompts=[Prompt(rendered, "messages", add_special_tokens=False)],  # the template contains them
            max_tokens=max_tokens,
            best_of=shared["n"],
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            markers=() if answer_format is None else answer_format.markers,
            **shared,
        )

    def to_relayed_request(self, conversation: list[dict[str, Any]]) -> GenerationRequest:
        """Return the request with a conversation that another server renders. Raises InvalidRequest."""
        if self.chat_template is not None:
            raise InvalidRequest(
                "chat_template: the model runs on another server, which has its own; leave it out",
                param="chat_template",
                code="not_supported",
            )
        choice = self.tool_choice
        chat = Chat(
            messages=conversation,
            tools=[_tool_as_written(tool) for tool in self.tools or ()] or None,
            tool_choice=msgspec.to_builtins(choice) if isinstance(choice, NamedTool) else choice,
            is_parallel=self.parallel_tool_calls,
            reasoning_effort=self.reasoning_effort,
            max_reasoning_tokens=self.max_reasoning_tokens,
            template_variables=self.chat_template_kwargs or {},
            adds_generation_prompt=self.add_generation_prompt is not False,
            continues_final_message=bool(self.continue_final_message),
        )
        text = "".join(message["content"] for message in conversation)  # what its length is estimated of
        return msgspec.structs.replace(self.to_generation_request(text), chat=chat)


def _tool_as_written(tool: Tool) -> dict[str, Any]:
    function = tool.function.for_template()
    if tool.function.strict is not None:
        function["strict"] = tool.function.strict
    return {"type": "function", "function": function}


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


class FunctionCall(Struct):
    """The function that is called, and its arguments as a text with JSON."""

    name: str
    arguments: str


class ToolCall(Struct):
    """One call."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatAnswer(Struct):
    """The assistant's message."""

    content: str | None  # null next to calls, if there is none
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class FunctionCallDelta(Struct):
    """The part of a function call in one chunk: its name comes first, its arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct):
    """The part of one call in one chunk."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta = msgspec.field(default_factory=FunctionCallDelta)


class ChatDelta(Struct):
    """The part of the message in one chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """The part of one answer in one chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(Struct):
    """The answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage
    explanation: Explanation | UnsetType = UNSET  # with `explain`
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """One chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: OpenAIUsage | UnsetType | None = UNSET
    explanation: Explanation | UnsetType = UNSET  # with `explain`, in the last chunk
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def finish_reason(reason: FinishReason, stop_reason: str | int | None) -> tuple[str, str | int | None]:
    """Return OpenAI's name of a finish reason, and vLLM's `stop_reason`."""
    if reason is FinishReason.DEADLINE:
        return "abort", "deadline"
    return str(reason), stop_reason


# -- models ------------------------------------------------------------------------------------------------------------


class Model(Struct):
    """A served model."""

    id: str
    created: int
    max_model_len: int | None  # null until the model has been loaded for the first time
    object: str = "model"
    owned_by: str = "servekit"
    root: str | None = None
    parent: str | None = None  # of a LoRA adapter: the model that it changes
    kind: str = "generate"  # what it does: generate, embed, rerank or classify
    state: str | UnsetType = UNSET  # of a server with several models: cold, waiting, loading, ready, unloading, failed


class ModelList(Struct):
    """All served models."""

    data: list[Model]
    object: str = "list"
