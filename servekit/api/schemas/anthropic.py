"""Define Anthropic's wire format: /v1/messages and /v1/messages/count_tokens.

A body is turned into a ChatCompletionRequest, which has all that a chat can ask for. Unknown fields are ignored, as on
the other /v1 routes. A known field that would change the answer and is not supported (`mcp_servers`) is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from servekit.api.schemas.common_fields import CommonFields, Count, StopString, described
from servekit.api.schemas.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    ChatMessage,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
)
from servekit.errors import InvalidRequest
from servekit.scheduler.sequence import FinishReason

# -- requests ----------------------------------------------------------------------------------------------------------


class InputBlock(Struct, kw_only=True):
    """A block of a message: text, thinking, a call of a tool, or the result of one."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    thinking: str | None = None  # of an earlier turn
    id: str | None = None  # of a call
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of the call whose result this is
    content: str | list[InputBlock] | None = None  # of a result


class InputMessage(Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class AnthropicTool(Struct, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    type: Annotated[str, Meta(max_length=64)] | None = None
    description: str | None = None
    input_schema: dict[str, Raw] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    """Whether the answer calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model reasons, and for how many tokens at most."""

    type: Annotated[str, Meta(max_length=64)]
    budget_tokens: Count | None = None


class OutputFormat(Struct, kw_only=True):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Raw]


class OutputConfig(Struct, kw_only=True):
    """The form of the answer, and how much to reason."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(CommonFields, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Annotated[
        str | None, described("the served model's name; dummy, tgi, empty and absent mean that model, too")
    ] = None
    system: Annotated[str | list[InputBlock] | None, described("instructions before the conversation")] = None
    tools: Annotated[
        Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None, described("tools that the client runs")
    ] = None
    tool_choice: Annotated[
        AnthropicToolChoice | None, described("whether the answer calls tools: auto, any, tool or none; default: auto")
    ] = None
    thinking: Annotated[
        Thinking | None, described("whether the model reasons (enabled, disabled, adaptive), and its budget_tokens")
    ] = None
    output_config: Annotated[
        OutputConfig | None, described("format: the JSON schema that the answer matches; effort: how much to reason")
    ] = None
    output_format: Annotated[OutputFormat | None, described("older name of output_config.format")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("additional variables for the chat template")] = (
        None
    )
    mcp_servers: Annotated[Any, described("refused: the server calls no others")] = None
    container: Annotated[Any, described("refused: the server runs no code")] = None

    def check(self) -> None:
        """Raise InvalidRequest for features that are not supported, before the conversation is rendered."""
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} is not supported by this server, which runs no tools; leave it out", param=name
                )
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                raise InvalidRequest(
                    f"tools[{index}] has the type {tool.type!r}; this server does not support Anthropic's own "
                    "tools. Describe a tool that your client runs, with input_schema",
                    param=f"tools[{index}].type",
                )
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise InvalidRequest("tool_choice.name is missing; the type 'tool' needs it", param="tool_choice.name")
        self.to_chat().check()

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them. Raises InvalidRequest for images, documents and so on."""
        messages: list[ChatMessage] = []
        if self.system:
            messages.append(ChatMessage(role="system", content=_text_of(self.system, "system")))
        for index, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{index}].content")
        return [message.for_template(index) for index, message in enumerate(messages)]

    def drop_conversation(self) -> None:
        """Replace the messages by one that is short: what they say was taken out."""
        self.messages = [InputMessage(role=self.messages[-1].role, content="")]  # its role says whether it is continued
        self.system = None

    def to_chat(self) -> ChatCompletionRequest:
        """Return the request without its conversation, as OpenAI's clients would send it. Raises InvalidRequest."""
        continues = self.messages[-1].role == "assistant"
        chat = ChatCompletionRequest(
            messages=[],
            tools=[_tool(tool) for tool in self.tools or ()],
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=continues,
            **{name: getattr(self, name) for name in CommonFields.__struct_fields__},
        )
        if (choice := self.tool_choice) is not None:
            named = NamedTool(type="function", function=FunctionName(name=choice.name or ""))
            chat.tool_choice = {"auto": "auto", "none": "none", "any": "required", "tool": named}[choice.type]  # type: ignore[assignment]
            chat.parallel_tool_calls = not choice.disable_parallel_tool_use
        config = self.output_config or OutputConfig()
        chat.reasoning_effort = config.effort
        if self.thinking is not None:
            chat.thinking_token_budget = self.thinking.budget_tokens
            if self.thinking.type == "disabled":
                chat.reasoning_effort = "none"
        wanted = config.format or self.output_format
        if wanted is not None:
            chat.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=wanted.schema))
        return chat


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Annotated[Count, described("maximum length of the answer")]
    stream: Annotated[bool | None, described("send the answer as server-sent events")] = None
    stop_sequences: Annotated[
        list[StopString] | None, described("texts that end the answer; they are not part of it")
    ] = None

    def to_chat(self) -> ChatCompletionRequest:
        """Return the request without its conversation, as OpenAI's clients would send it. Raises InvalidRequest."""
        chat = super().to_chat()
        chat.max_completion_tokens = self.max_tokens
        if self.stop_sequences is not None:
            if self.stop is not None:
                raise InvalidRequest("stop_sequences and stop are both set; send one of them", param="stop")
            chat.stop = self.stop_sequences
        return chat


def _tool(tool: AnthropicTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _text_of(content: str | list[InputBlock] | None, where: str) -> str:
    """Return the text of blocks that may only be text. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise _unsupported(block, f"{where}[{index}]")
    return "".join(block.text or "" for block in content)


def _unsupported(block: InputBlock, where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is a block of type {block.type!r}; this server supports text only", param=where)


def _chat_messages(message: InputMessage, where: str) -> list[ChatMessage]:
    """Return a message as OpenAI's clients would send it: each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results: list[ChatMessage] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        match block.type:
            case "text" if block.text is not None:
                texts.append(block.text)
            case "thinking" if block.thinking is not None:
                thoughts.append(block.thinking)
            case "redacted_thinking":  # of another model; it cannot be read
                pass
            case "tool_use" if block.name is not None:
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id or "", "type": "function", "function": function})
            case "tool_result":
                text = _text_of(block.content, f"{where}[{index}].content")
                results.append(ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id))
            case _:
                raise _unsupported(block, f"{where}[{index}]")
    if results and not texts:
        return results
    spoken = ChatMessage(role=message.role, content="".join(texts))
    spoken.reasoning_content = "".join(thoughts) or None
    spoken.tool_calls = calls or None
    return [*results, spoken]


# -- answers -----------------------------------------------------------------------------------------------------------


class TextBlock(Struct, tag="text"):
    """Content that is meant for the user."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """Reasoning. Nothing is signed here; clients send back only what has a signature."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag="tool_use"):
    """A call of a tool, for the client to run."""

    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicUsage(Struct):
    """The number of tokens that a request used. Cached ones are not among `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class AnthropicMessage(Struct, tag="message"):
    """The answer."""

    id: str
    model: str
    content: list[OutputBlock]
    usage: AnthropicUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class TokenCount(Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


class AnthropicErrorDetail(Struct):
    """What is wrong, Anthropic's kind of error, the field that it is about, and a code for programs."""

    type: str
    message: str
    param: str | None
    code: str


class AnthropicError(Struct, tag="error"):
    """The body of every error answer, and the event of an error in a stream."""

    error: AnthropicErrorDetail


# -- events of a stream ------------------------------------------------------------------------------------------------


class MessageStart(Struct, tag="message_start"):
    """The answer begins."""

    message: AnthropicMessage


class ContentBlockStart(Struct, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: OutputBlock


class TextDelta(Struct, tag="text_delta"):
    """More text of a block."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    """More reasoning of a block."""

    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    """The signature of a block of reasoning."""

    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """More of the input of a call."""

    partial_json: str


class ContentBlockDelta(Struct, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageEnd(Struct):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    """All blocks are complete."""

    delta: MessageEnd
    usage: AnthropicUsage


class MessageStop(Struct, tag="message_stop"):
    """The last event."""


class Ping(Struct, tag="ping"):
    """Sent while there are no tokens."""


AnthropicEvent = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
)


def stop_reason(reason: FinishReason, stopped_by: str | int | None, has_calls: bool) -> tuple[str, str | None]:
    """Return Anthropic's name of a finish reason, and the stop sequence. What was cut ends with `max_tokens`."""
    if reason is not FinishReason.STOP:
        return "max_tokens", None
    if has_calls:
        return "tool_use", None
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


def error_type(status: int, type_: str) -> str:
    """Return Anthropic's name of the kind of an error."""
    own = {404: "not_found_error", 413: "request_too_large"}
    return own.get(status, "api_error" if type_ == "server_error" else type_)
