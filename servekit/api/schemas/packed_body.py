"""Pack a large body, once it is decoded and checked, so that the event loop can take it over in short slices.

Decoding JSON is one call that holds the interpreter's lock: a body of 8 MB takes up to a second. So bodies over
MAX_INLINE_BYTES are decoded in a process of their own (servekit.api.body_process). It sends back what `pack` returns:
the long values as bytes, and the rest as JSON that is short.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from servekit.api.schemas.anthropic import CountTokensRequest, MessagesRequest
from servekit.api.schemas.json_body import MAX_BODY_DECODED_TWICE, decode, is_tgi_body
from servekit.api.schemas.native import AbortRequest, GenerateRequest
from servekit.api.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from servekit.api.schemas.openai import ChatCompletionRequest, CompletionRequest
from servekit.api.schemas.predictions import (
    EmbeddingsRequest,
    InferAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    PredictionFields,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    ascii_of,
)
from servekit.api.schemas.responses_api import ResponsesRequest
from servekit.api.schemas.tgi import TgiRequest, decode_tgi
from servekit.api.schemas.tokens import DetokenizeRequest, TgiTokenizeRequest, TokenizeRequest
from servekit.errors import InvalidRequest, RequestError, prompt_too_long
from servekit.requests.inference import Tensor

# A body of this size takes at most 3 ms to decode, to check and to free, whatever it contains.
MAX_INLINE_BYTES = 2**16
assert MAX_INLINE_BYTES == MAX_BODY_DECODED_TWICE
MAX_SHORT_BYTES = 2**17  # of all fields besides the long ones, which the event loop decodes in one piece
MAX_MESSAGE_BYTES = 2**16  # of a message besides its content
LONG_CONTENT = 2**14  # characters of a message's content, from which on it is sent apart

# The fields of each kind of body that may be long, and what stands for them in the short rest.
_LONG_FIELDS: dict[type[Struct], dict[str, Any]] = {
    CompletionRequest: {"prompt": "", "suffix": ""},
    GenerateRequest: {"prompt": "", "prompts": [""]},
    TgiRequest: {"inputs": ""},
    TokenizeRequest: {"prompt": ""},
    TgiTokenizeRequest: {"inputs": ""},
    DetokenizeRequest: {"tokens": []},
    AbortRequest: {},
    ChatCompletionRequest: {},  # of chats, the conversation is sent apart
    MessagesRequest: {},
    CountTokensRequest: {},
    ResponsesRequest: {},
    OllamaChatRequest: {},
    OllamaGenerateRequest: {"suffix": ""},
    OllamaShowRequest: {},
    EmbeddingsRequest: {"input": ""},
    TeiEmbedRequest: {"inputs": ""},
    OllamaEmbedRequest: {"input": ""},
    OllamaEmbeddingsRequest: {"prompt": ""},
    RerankRequest: {"query": "", "documents": [], "texts": []},
    ScoreRequest: {"text_1": "", "text_2": ""},
    PredictRequest: {"input": "", "image": "", "inputs": "", "tensors": []},
    InferAnswer: {"outputs": []},
}
TGI_KINDS = (TgiRequest, TgiTokenizeRequest)
KINDS = {kind.__name__: kind for kind in _LONG_FIELDS}


@runtime_checkable
class ChatBody(Protocol):
    """The body of a chat, in any wire format."""

    def check(self) -> None:
        """Raise InvalidRequest for what no type can express."""

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them. Raises InvalidRequest."""

    def drop_conversation(self) -> None:
        """Replace what `conversation` returns by something short."""


class Text(Struct, tag=True):
    """One text."""

    utf8: memoryview


class Texts(Struct, tag=True):
    """A list of texts."""

    utf8: memoryview
    lengths: memoryview  # in bytes, as integers of 32 bits


class TokenIds(Struct, tag=True):
    """One list of token ids."""

    int32: memoryview


class TokenIdLists(Struct, tag=True):
    """A list of lists of token ids."""

    int32: memoryview
    lengths: memoryview  # in token ids, as integers of 32 bits


class Tensors(Struct, tag=True):
    """A list of tensors."""

    heads: memoryview  # JSON of the tensors, without their data
    data: list[memoryview]  # of each one, as JSON


class Images(Struct, tag=True):
    """An image, or a list of images: base64 as ASCII, which stays bytes.

    To make a text of 8 MB and to encode it again holds the event loop for milliseconds.
    """

    ascii: memoryview
    lengths: memoryview | None  # in bytes, as integers of 32 bits; None: it is one image


class Conversation(Struct, tag=True):
    """Messages as chat templates expect them."""

    pieces: list[memoryview]  # lists of messages, as msgpack
    long_contents: dict[int, memoryview]  # by message, as UTF-8


Long = Text | Texts | TokenIds | TokenIdLists | Tensors | Images | Conversation


class PackedBody(Struct, tag=True):
    """A valid body of one of the KINDS."""

    kind: str
    short: memoryview  # JSON of that kind
    long: dict[str, Long]


class Refusal(Struct, tag=True):
    """Why a body is refused: the parts of a RequestError."""

    kind: str
    is_context_too_long: bool
    message: str
    param: str | None
    code: str


class DecodeBody(Struct):
    """Decode a body as the first of the kinds, or as the second one, which is TGI's, if it has `inputs`."""

    kinds: list[str]
    max_prompt_tokens: int  # a longer list of token ids is refused, unless the request truncates it
    body: memoryview


def choose_kind(body: bytes, kinds: Sequence[type[Struct]]) -> type[Struct]:
    """Return the kind of a body on a route that takes these kinds."""
    return kinds[1] if len(kinds) > 1 and is_tgi_body(body) else kinds[0]


def decode_kind(body: bytes, kind: type[Struct]) -> Any:
    """Decode and check a body. Raises InvalidRequest."""
    return decode_tgi(body) if kind is TgiRequest else decode(body, kind)


def pack(job: DecodeBody) -> PackedBody | Refusal:
    """Decode and check a body, and pack it."""
    body, kind = bytes(job.body), KINDS[job.kinds[0]]
    try:
        kind = choose_kind(body, [KINDS[name] for name in job.kinds])
        return _pack(decode_kind(body, kind), job.max_prompt_tokens)
    except RequestError as error:
        is_too_long = not isinstance(error, InvalidRequest)
        return Refusal(kind.__name__, is_too_long, error.message, error.param, error.answer_code)
    except OverflowError:
        message = "the request body has an integer of more than 64 bits in a message; send a smaller one, or a text"
        return Refusal(kind.__name__, False, message, "messages", InvalidRequest.code)
    except MemoryError:
        message = f"the request body of {len(body)} bytes takes more memory than a body may take; send a smaller one"
        return Refusal(kind.__name__, False, message, None, InvalidRequest.code)


def _pack(wanted: Any, max_prompt_tokens: int) -> PackedBody:
    kind, truncate = type(wanted), None
    long: dict[str, Long] = {}
    if isinstance(wanted, ChatBody):
        wanted.check()
        long["conversation"] = _conversation(wanted)
        wanted.drop_conversation()
    elif isinstance(wanted, CompletionRequest | GenerateRequest | TgiRequest):
        truncate = wanted.to_generation_request().truncate  # this checks what no type can express
    elif isinstance(wanted, PredictionFields):
        wanted.check()
    for name, placeholder in _LONG_FIELDS[kind].items():
        value = getattr(wanted, name)
        if value is not None:
            if isinstance(wanted, CompletionRequest):
                value = _truncated(value, name, truncate, max_prompt_tokens)
            elif isinstance(wanted, EmbeddingsRequest):
                value = _beginnings(value, max_prompt_tokens + 1)
            long[name] = _packed(wanted, name, value)
            setattr(wanted, name, placeholder)
    short = msgspec.json.encode(wanted)
    if len(short) > MAX_SHORT_BYTES:
        names = " and ".join(long)
        raise InvalidRequest(
            f"the fields of the request body besides {names} take {len(short)} bytes; the limit is {MAX_SHORT_BYTES}: "
            "send fewer or shorter ones"
        )
    return PackedBody(kind.__name__, memoryview(short), long)


def _truncated(prompt: Any, name: str, truncate: int | None, max_tokens: int) -> Any:
    """Return a prompt without the token ids that the request truncates. Raises ContextTooLong."""
    if isinstance(prompt, str) or isinstance(prompt[0], str):
        return prompt
    is_flat = isinstance(prompt[0], int)
    prompts = [prompt] if is_flat else prompt
    if truncate is not None:
        prompts = [token_ids[-truncate:] for token_ids in prompts]
    for index, token_ids in enumerate(prompts):
        if len(token_ids) > max_tokens:
            raise prompt_too_long(max_tokens, len(token_ids), name if is_flat else f"{name}[{index}]")
    return prompts[0] if is_flat else prompts


def _beginnings(value: Any, max_tokens: int) -> Any:
    """Return inputs with only their first token ids: the engine does not use the others, which may be millions."""
    if isinstance(value, str) or isinstance(value[0], str):
        return value
    return value[:max_tokens] if isinstance(value[0], int) else [token_ids[:max_tokens] for token_ids in value]


def _packed(wanted: Any, name: str, value: Any) -> Long:
    if isinstance(wanted, InferAnswer):
        return _tensors(value)
    if isinstance(wanted, PredictRequest) and name == "image":
        return _images(value)
    return _long(value)


def _long(value: Any) -> Long:
    if isinstance(value, str):
        return Text(memoryview(_utf8(value)))
    if not value or isinstance(value[0], int):
        return TokenIds(_int32(value))
    if isinstance(value[0], str):
        encoded = [_utf8(text) for text in value]
        return Texts(memoryview(b"".join(encoded)), _int32([len(text) for text in encoded]))
    if isinstance(value[0], Tensor):
        return _tensors(value)
    token_ids = array("i")
    for each in value:
        token_ids.extend(each)
    return TokenIdLists(memoryview(token_ids.tobytes()), _int32([len(each) for each in value]))


def _images(value: str | list[str]) -> Images:
    if isinstance(value, str):
        return Images(ascii_of(value), None)
    encoded = [ascii_of(text) for text in value]
    return Images(memoryview(b"".join(encoded)), _int32([len(text) for text in encoded]))


def _tensors(tensors: list[Tensor]) -> Tensors:
    heads = msgspec.json.encode([replace(each, data=Raw(b"0")) for each in tensors])
    if len(heads) > MAX_SHORT_BYTES:
        raise InvalidRequest(
            f"the names and shapes of tensors take {len(heads)} bytes; the limit is {MAX_SHORT_BYTES}: send fewer",
            param="tensors",
        )
    return Tensors(memoryview(heads), [memoryview(each.data) for each in tensors])


def _int32(values: list[int]) -> memoryview:
    return memoryview(array("i", values).tobytes())


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _conversation(wanted: ChatBody) -> Conversation:
    packed, long_contents = [], {}
    for index, message in enumerate(wanted.conversation()):
        if len(message["content"]) >= LONG_CONTENT:
            long_contents[index] = memoryview(_utf8(message["content"]))
            message["content"] = ""
        packed.append(msgspec.msgpack.encode(message))
        num_bytes = len(packed[-1]) - len(message["content"])
        if num_bytes > MAX_MESSAGE_BYTES:
            param = f"messages[{index}]"
            raise InvalidRequest(
                f"{param} takes {num_bytes} bytes besides its content; the limit is {MAX_MESSAGE_BYTES}: send fewer or "
                "shorter tool_calls",
                param=param,
            )
    return Conversation(list(_pieces(packed)), long_contents)


def _pieces(packed: list[bytes]) -> Any:
    """Join messages to lists that take less than a millisecond to decode."""
    start = size = 0
    for end, message in enumerate(packed, 1):
        size += len(message)
        if size >= MAX_MESSAGE_BYTES // 2 or end == len(packed):
            count = (end - start).to_bytes(4, "big")
            yield memoryview(b"\xdd" + count + b"".join(packed[start:end]))  # msgpack's array of 2**16 items and more
            start, size = end, 0
