"""Write a request in the format of OpenAI's API, for the server of a remote model. This is pure.

What the server cannot do is refused with a message, and never ignored: parameters that would change the answer, and
everything about token ids, because the tokenizer is not known here. Priorities and settings of drafts apply only to
this server's own models, so they have no effect.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal

import msgspec
from msgspec import Struct

from servekit.errors import InvalidRequest
from servekit.requests.generation import Chat, GenerationRequest, Grammar, GrammarKind, Sampling

Dialect = Literal["openai", "vllm", "tgi"]
Json = dict[str, Any]

MAX_PARTS_ON_LOOP = 1000  # messages and tool calls; each takes about a microsecond
_OF_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop")
# vLLM's, and the value that is the same as leaving it out.
_OF_VLLM: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "allowed_token_ids": None,
    "bad_words": [],
    "min_tokens": 0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
_STRUCTURED = {GrammarKind.REGEX: "regex", GrammarKind.CHOICE: "choice", GrammarKind.EBNF: "grammar"}


class RemoteRequest(Struct, frozen=True):
    """One request to the server, for all answers to one prompt or to one conversation."""

    path: str
    fields: Json  # of the body, without the messages
    messages: list[Json] | None = None  # may be long: the caller encodes them one after the other


def check_supported(request: GenerationRequest, model: str, dialect: Dialect) -> None:
    """Raise InvalidRequest for what the server of a remote model cannot do. `model` is its name here."""
    refused = {
        "logprobs": request.logprobs is not None and dialect != "vllm",
        "prompt_logprobs": request.prompt_logprobs is not None,
        "return_token_ids": request.returns_token_ids,
        "truncate": request.truncate is not None,
        "suffix": request.suffix is not None,
        "best_of": request.best_of > request.n,
        "typical_p": request.sampling.typical_p not in (None, 1.0),
        "n": request.n > 1 and dialect == "tgi",  # it takes both, and ignores them
        "logit_bias": bool(request.sampling.logit_bias) and dialect == "tgi",
    }
    for name, is_wanted in refused.items():
        if is_wanted:
            raise _refusal(name, model)
    for prompt in request.prompts:
        if not isinstance(prompt.content, str):
            raise InvalidRequest(
                f"the model {model!r} runs on another server, whose token ids are not known here; send the prompt as "
                "text",
                param=prompt.param,
                code="not_supported",
            )
        if not prompt.content and request.chat is None:
            raise InvalidRequest(f"{prompt.param} is empty; send a text", param=prompt.param)
    if request.chat is None and request.max_tokens is None:
        raise InvalidRequest(
            f"the model {model!r} runs on another server, which would end the answer after a few tokens; send "
            "max_tokens (or max_new_tokens)",
            param="max_tokens",
        )
    if dialect != "vllm":
        _check_dialect(request, model)


def _check_dialect(request: GenerationRequest, model: str) -> None:
    """Raise InvalidRequest for parameters of vLLM."""
    for name, neutral in _OF_VLLM.items():
        value = getattr(request.sampling, name)
        if value is not None and value != neutral and not (name == "top_k" and value == -1):
            raise _refusal(name, model)
    grammar, chat = request.grammar, request.chat
    if grammar is not None and (grammar.kind in _STRUCTURED or chat is None):
        raise _refusal(grammar.param, model)
    if chat is not None:
        extras = {
            "chat_template_kwargs": chat.template_variables,
            "continue_final_message": chat.continues_final_message,
            "add_generation_prompt": not chat.adds_generation_prompt,
            "thinking_token_budget": chat.max_reasoning_tokens is not None,
        }
        for name, is_wanted in extras.items():
            if is_wanted:
                raise _refusal(name, model)


def _refusal(param: str, model: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model {model!r} runs on another server, which is not known to support {param}; leave it out",
        param=param,
        code="not_supported",
    )


def is_long(request: GenerationRequest) -> bool:
    """Whether `write_requests` would hold the event loop for more than about a millisecond."""
    messages = request.chat.messages if request.chat is not None else []
    return len(messages) + sum(len(each.get("tool_calls") or ()) for each in messages) > MAX_PARTS_ON_LOOP


def write_requests(request: GenerationRequest, name: str, dialect: Dialect) -> list[RemoteRequest]:
    """Return the requests for all prompts. `name` is the model's name there. Raises InvalidRequest."""
    chat = request.chat
    fields: Json = {"model": name, "stream": True, "stream_options": {"include_usage": True}, **_sampling(request)}
    if request.n > 1:
        fields["n"] = request.n
    if request.logprobs is not None:
        fields |= _logprobs(request.logprobs, is_chat=chat is not None)
    if request.grammar is not None:
        fields |= _grammar(request.grammar)
    if chat is not None:
        fields |= _chat_fields(chat, dialect)
        if request.max_tokens is not None:
            # OpenAI's newer models refuse max_tokens; TGI ignores max_completion_tokens, so answers had no limit.
            fields["max_completion_tokens" if dialect == "openai" else "max_tokens"] = request.max_tokens
        return [RemoteRequest("/chat/completions", fields, as_openai_writes(chat.messages, dialect))]
    fields["max_tokens"] = request.max_tokens  # `check_supported` refuses a prompt without it
    return [RemoteRequest("/completions", {**fields, "prompt": prompt.content}) for prompt in request.prompts]


def _sampling(request: GenerationRequest) -> Json:
    sampling: Sampling = request.sampling
    fields = {name: getattr(sampling, name) for name in _OF_OPENAI}
    for name, neutral in _OF_VLLM.items():
        value = getattr(sampling, name)
        fields[name] = None if value == neutral else value
    if sampling.top_k == -1:
        fields["top_k"] = None
    if sampling.do_sample is False:
        fields["temperature"] = 0.0
    return {name: value for name, value in fields.items() if value is not None}


def _logprobs(num_top: int, is_chat: bool) -> Json:
    if not is_chat:
        return {"logprobs": num_top}
    return {"logprobs": True, **({"top_logprobs": num_top} if num_top else {})}


def _grammar(grammar: Grammar) -> Json:
    if grammar.kind is GrammarKind.JSON:
        return {"response_format": {"type": "json_object"}}
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = {"name": "answer", "strict": True, "schema": _parsed(grammar)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert grammar.kind in _STRUCTURED, "the server composes grammars for its own models only"
    value = _parsed(grammar) if grammar.kind is GrammarKind.CHOICE else grammar.text
    return {"structured_outputs": {_STRUCTURED[grammar.kind]: value}}


def _parsed(grammar: Grammar) -> Any:
    try:
        return msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{grammar.param} is not valid JSON; send a JSON schema", param=grammar.param) from None


def _chat_fields(chat: Chat, dialect: Dialect) -> Json:
    fields: Json = {}
    if chat.tools:
        fields["tools"] = chat.tools
        if chat.tool_choice is not None:
            fields["tool_choice"] = chat.tool_choice
        if chat.is_parallel is not None:
            fields["parallel_tool_calls"] = chat.is_parallel
    if chat.reasoning_effort is not None:
        fields["reasoning_effort"] = chat.reasoning_effort
    if dialect == "vllm":
        if chat.template_variables:
            fields["chat_template_kwargs"] = chat.template_variables
        if chat.continues_final_message:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        elif not chat.adds_generation_prompt:
            fields["add_generation_prompt"] = False
        if chat.max_reasoning_tokens is not None:
            fields["thinking_token_budget"] = chat.max_reasoning_tokens
    return fields


def as_openai_writes(conversation: list[Json], dialect: Dialect) -> list[Json]:
    """Convert messages from the form that chat templates expect to that of OpenAI's API.

    Arguments of calls become text again. OpenAI's API needs an id for each call, and clients of Ollama give none. So
    ids are added, and results belong to the calls in order.
    """
    messages, num_calls = [], 0
    # Of calls without a result, in order. In a list, to find the ids of thousands of calls would take seconds.
    open_ids: OrderedDict[str, int] = OrderedDict()  # and how many calls have the id
    for each in conversation:
        message: Json = {name: each[name] for name in ("role", "content", "name", "tool_call_id") if name in each}
        if dialect == "vllm" and each.get("reasoning_content"):
            message["reasoning_content"] = each["reasoning_content"]
        if each.get("tool_calls"):
            message["tool_calls"] = calls = []
            for call in each["tool_calls"]:
                call_id = call.get("id") or f"call_{num_calls}"
                num_calls += 1
                if not isinstance(call_id, str):
                    raise InvalidRequest("messages has a tool call whose id is not a string", param="messages")
                open_ids[call_id] = open_ids.get(call_id, 0) + 1
                calls.append({"id": call_id, "type": "function", "function": _function(call)})
            message["content"] = message.get("content") or None
        elif message["role"] == "tool":
            call_id = message.setdefault("tool_call_id", next(iter(open_ids), "call_0"))
            if not isinstance(call_id, str):
                raise InvalidRequest("messages has a tool_call_id that is not a string", param="messages")
            if open_ids.get(call_id, 0) > 1:
                open_ids[call_id] -= 1
            else:
                open_ids.pop(call_id, None)
        messages.append(message)
    return messages


def _function(call: Json) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("messages has a tool call without a function's name", param="messages")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {"name": function["name"], "arguments": arguments}
