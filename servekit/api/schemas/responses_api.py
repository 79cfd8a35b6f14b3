"""Define OpenAI's wire format of responses: /v1/responses.

A body is turned into a ChatCompletionRequest, which has all that a chat can ask for. Unknown fields are ignored, as on
the other /v1 routes. Fields that need what this server does not keep or run (`previous_response_id`, `background`) are
refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from servekit.api.schemas.common_fields import CommonFields, Count, described
from servekit.api.schemas.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
)
from servekit.errors import InvalidRequest

MAX_METADATA = 16

# -- requests ----------------------------------------------------------------------------------------------------------


class InputItem(Struct, kw_only=True):
    """A message, reasoning of an earlier turn, a call of a function, or the result of one."""

    type: Annotated[str, Meta(max_length=64)] | None = None  # null: a message
    role: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None  # the result of a call
    summary: list[ContentPart] | None = None  # of reasoning


class ResponsesTool(Struct, kw_only=True):
    """A function that the client runs."""

    type: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")] | UnsetType = UNSET
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    strict: bool | None = None


class ResponsesToolChoice(Struct, kw_only=True):
    """The function that the answer must call."""

    type: Annotated[str, Meta(max_length=64)]
    name: str | UnsetType = UNSET


class TextFormat(Struct, kw_only=True):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | UnsetType = UNSET
    schema: dict[str, Raw] | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class TextConfig(Struct, kw_only=True):
    """The form of the text, in its own object."""

    format: TextFormat | None = None


class ReasoningConfig(Struct, kw_only=True):
    """How much to reason."""

    effort: Annotated[str, Meta(max_length=32)] | None = None


class ResponsesRequest(CommonFields, kw_only=True):
    """The body of /v1/responses."""

    input: Annotated[
        str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)],
        described("a text, or the items of the conversation"),
    ]
    model: Annotated[
        str | None, described("the served model's name; dummy, tgi, empty and absent mean that model, too")
    ] = None
    instructions: Annotated[str | None, described("instructions before the conversation")] = None
    max_output_tokens: Annotated[
        Count | None, described("maximum length of the answer; default: what the context holds")
    ] = None
    stream: Annotated[bool | None, described("send the answer as server-sent events")] = None
    text: Annotated[TextConfig | None, described("format: text, json_object, or json_schema with a schema")] = None
    tools: Annotated[
        Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None,
        described("functions that the model may call"),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponsesToolChoice | None,
        described("whether the answer calls functions: auto lets the model choose; default: auto, if there are tools"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("the answer may have several calls; default: true")] = None
    reasoning: Annotated[ReasoningConfig | None, described("effort: how much to reason; none: not at all")] = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        described("end the reasoning after this many tokens; -1 is off"),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("additional variables for the chat template")] = (
        None
    )
    metadata: Annotated[
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA),
        ]
        | None,
        described("texts that the answer repeats"),
    ] = None
    store: Annotated[bool | None, described("ignored: nothing is stored, and the answer says so")] = None
    truncation: Annotated[str | None, described("only disabled: a prompt that is too long is refused")] = None
    top_logprobs: Annotated[Any, described("refused: send the chat to /v1/chat/completions")] = None
    previous_response_id: Annotated[Any, described("refused: nothing is stored; send the whole conversation")] = None
    conversation_id: Annotated[Any, msgspec.Meta(description="refused: nothing is stored")] = msgspec.field(
        default=None, name="conversation"
    )
    background: Annotated[Any, described("refused: nothing is stored, so the answer could not be fetched")] = None
    prompt: Annotated[Any, described("refused: the server stores no prompts")] = None

    def check(self) -> None:
        """Raise InvalidRequest for features that are not supported, before the conversation is rendered."""
        for name, remedy in _REFUSED.items():
            if getattr(self, name):
                name = "conversation" if name == "conversation_id" else name
                raise InvalidRequest(f"{name} is not supported by this server: {remedy}", param=name)
        if self.truncation not in (None, "disabled"):
            raise InvalidRequest(
                f"truncation = {self.truncation[:40]!r} is not supported by this server; send fewer items, and leave "
                "it out",
                param="truncation",
            )
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                raise InvalidRequest(
                    f"tools[{index}] has the type {tool.type!r}; this server runs no tools. Describe a function that "
                    "your client runs",
                    param=f"tools[{index}].type",
                )
            if tool.name is UNSET:
                raise InvalidRequest(f"tools[{index}].name is missing; it is required", param=f"tools[{index}].name")
        choice = self.tool_choice
        if isinstance(choice, ResponsesToolChoice) and (choice.type != "function" or choice.name is UNSET):
            raise InvalidRequest(
                f"tool_choice of the type {choice.type!r} is not supported by this server; send none, auto, required, "
                "or a function's name",
                param="tool_choice",
            )
        wanted = self.text and self.text.format
        if wanted and wanted.type == "json_schema" and wanted.schema is UNSET:
            raise InvalidRequest(
                "text.format: the type 'json_schema' needs a schema; send it in schema", param="text.format.schema"
            )
        self.to_chat().check()

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them. Raises InvalidRequest for images, files and the like."""
        messages: list[ChatMessage] = []
        if self.instructions:
            messages.append(ChatMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            _add_items(messages, self.input)
        return [message.for_template(index) for index, message in enumerate(messages)]

    def drop_conversation(self) -> None:
        """Replace the input by a short one: what it says was taken out."""
        self.input = ""
        self.instructions = None

    def to_chat(self) -> ChatCompletionRequest:
        """Return the request without its conversation, as a chat. Call it after `check`."""
        chat = ChatCompletionRequest(
            messages=[],
            max_completion_tokens=self.max_output_tokens,
            tools=[_tool(tool) for tool in self.tools or ()],
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            thinking_token_budget=self.thinking_token_budget,
            chat_template_kwargs=self.chat_template_kwargs,
            **{name: getattr(self, name) for name in CommonFields.__struct_fields__},
        )
        if isinstance(self.tool_choice, ResponsesToolChoice):
            chat.tool_choice = NamedTool(type="function", function=FunctionName(name=self.tool_choice.name or ""))
        else:
            chat.tool_choice = self.tool_choice
        if self.text is not None and (wanted := self.text.format) is not None:
            schema = JsonSchema(schema=wanted.schema or {})
            chat.response_format = ResponseFormat(type=wanted.type, json_schema=schema)
        return chat


_REFUSED = {
    "top_logprobs": "logprobs are on /v1/chat/completions; leave it out",
    "previous_response_id": "it stores no responses; send the whole conversation in input",
    "conversation_id": "it stores no conversations; send the whole one in input",
    "background": "it stores no responses, so this one could not be fetched later; leave it out, or send stream",
    "prompt": "it stores no prompts; send the text in instructions and input",
}


def _tool(tool: ResponsesTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name or "", description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _text_of(content: str | list[ContentPart] | None, where: str) -> str:
    """Return the text of parts that may only be text. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _TEXT_TYPES or part.text is None:
            raise InvalidRequest(
                f"{where}[{index}] is a part of type {part.type!r}; this server supports text only",
                param=f"{where}[{index}]",
            )
    return "".join(part.text or "" for part in content)


_TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def _add_items(messages: list[ChatMessage], items: list[InputItem]) -> None:
    """Add items as messages. What the assistant said in one turn, reasoning and calls included, is one message."""
    turn: ChatMessage | None = None  # of the assistant, if it is the last one
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type in (None, "message") and item.role != "assistant":
            if item.role is None:
                raise InvalidRequest(f"{where}.role is missing; a message needs it", param=f"{where}.role")
            role = "system" if item.role == "developer" else item.role
            messages.append(ChatMessage(role=role, content=_text_of(item.content, f"{where}.content")))
            turn = None
        elif item.type == "function_call_output":
            text = _text_of(item.output, f"{where}.output")
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))
            turn = None
        else:
            if turn is None:
                turn = ChatMessage(role="assistant", content="")
                messages.append(turn)
            _add_to_turn(turn, item, where)


def _add_to_turn(turn: ChatMessage, item: InputItem, where: str) -> None:
    match item.type:
        case None | "message":
            turn.content = f"{turn.content}{_text_of(item.content, f'{where}.content')}"
        case "reasoning":
            text = _text_of(item.content, f"{where}.content") or _text_of(item.summary, f"{where}.summary")
            turn.reasoning_content = (turn.reasoning_content or "") + text
        case "function_call" if item.name is not None:
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id or "", "type": "function", "function": function}
            turn.tool_calls = [*(turn.tool_calls or ()), call]
        case _:
            raise InvalidRequest(
                f"{where} is an item of type {item.type!r}; this server supports messages, reasoning, function_call "
                "and function_call_output",
                param=where,
            )


# -- answers -----------------------------------------------------------------------------------------------------------


class OutputText(Struct, tag="output_text"):
    """Content that is meant for the user."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)


class ReasoningText(Struct, tag="reasoning_text"):
    """Reasoning."""

    text: str


class OutputMessage(Struct, tag="message"):
    """The message of the answer."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(Struct, tag="reasoning"):
    """The reasoning of the answer. It is given as it is; there is no summary."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = msgspec.field(default_factory=list)


class FunctionCallItem(Struct, tag="function_call"):
    """A call of a function, for the client to run."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Details of the answer's tokens."""

    reasoning_tokens: int  # with the marker that ends the reasoning


class ResponsesUsage(Struct):
    """The number of tokens that a request used."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesFailure(Struct):
    """Why a stream failed."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why the answer was cut."""

    reason: str


class ResponseObject(Struct, kw_only=True):
    """The answer, as far as it is, and what was asked. The instructions are not repeated."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponsesUsage | None = None
    error: ResponsesFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: None = None
    previous_response_id: None = None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    tools: list[ResponsesTool]
    tool_choice: str | ResponsesToolChoice
    text: TextConfig
    reasoning: ReasoningConfig
    store: bool = False
    background: bool = False
    truncation: str = "disabled"


# -- events of a stream ------------------------------------------------------------------------------------------------


class ResponsesEvent(Struct, kw_only=True):
    """One event of a stream; they are numbered."""

    sequence_number: int = 0


class ResponseCreated(ResponsesEvent, tag="response.created"):
    """The answer begins."""

    response: ResponseObject


class ResponseInProgress(ResponsesEvent, tag="response.in_progress"):
    """The answer is being computed."""

    response: ResponseObject


class ResponseCompleted(ResponsesEvent, tag="response.completed"):
    """The answer is complete."""

    response: ResponseObject


class ResponseIncomplete(ResponsesEvent, tag="response.incomplete"):
    """The answer was cut."""

    response: ResponseObject


class ResponseFailed(ResponsesEvent, tag="response.failed"):
    """The answer failed; its error says why."""

    response: ResponseObject


class OutputItemAdded(ResponsesEvent, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class OutputItemDone(ResponsesEvent, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class _OfItem(ResponsesEvent, kw_only=True):
    item_id: str
    output_index: int


class ContentPartAdded(_OfItem, tag="response.content_part.added"):
    """A part of an item begins."""

    part: OutputText | ReasoningText
    content_index: int = 0


class ContentPartDone(_OfItem, tag="response.content_part.done"):
    """A part of an item is complete."""

    part: OutputText | ReasoningText
    content_index: int = 0


class OutputTextDelta(_OfItem, tag="response.output_text.delta"):
    """More text."""

    delta: str
    content_index: int = 0
    logprobs: list[Any] = msgspec.field(default_factory=list)


class OutputTextDone(_OfItem, tag="response.output_text.done"):
    """The whole text."""

    text: str
    content_index: int = 0
    logprobs: list[Any] = msgspec.field(default_factory=list)


class ReasoningTextDelta(_OfItem, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str
    content_index: int = 0


class ReasoningTextDone(_OfItem, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str
    content_index: int = 0


class FunctionCallArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta"):
    """More of the arguments of a call."""

    delta: str


class FunctionCallArgumentsDone(_OfItem, tag="response.function_call_arguments.done"):
    """The whole arguments of a call."""

    name: str
    arguments: str


AnyResponsesEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
)
