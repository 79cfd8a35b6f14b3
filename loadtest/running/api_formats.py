"""The paths and request bodies of each API format.

The formats are those of servekit (docs/native.md, docs/openai.md, docs/tgi.md), vLLM and text-generation-inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loadtest.target import ApiFormat, Target

PATHS = {
    ApiFormat.GENERATE_STREAM: "/generate_stream",
    ApiFormat.GENERATE: "/generate",
    ApiFormat.COMPLETIONS: "/v1/completions",
    ApiFormat.CHAT: "/v1/chat/completions",
    ApiFormat.TGI: "/generate_stream",
}
FORMATS_WITH_MODELS = (ApiFormat.COMPLETIONS, ApiFormat.CHAT)
# Fields of a TGI body that stand beside `parameters`.
_BESIDE_PARAMETERS = frozenset({"inputs", "parameters", "stream", "model", "options"})

History = Sequence[str]  # prompt, answer, prompt, …, and the prompt to be answered


def body_of(target: Target, model: str | None, histories: Sequence[History], max_tokens: int) -> bytes:
    """Return the body of one request. Only GENERATE takes several histories."""
    assert len(histories) == 1 or target.api is ApiFormat.GENERATE
    body = _fields_of(target, model, histories, max_tokens)
    if target.api is ApiFormat.TGI:
        parameters = body["parameters"]
        for name, value in target.fields.items():
            if name == "parameters":
                parameters.update(value)
            else:
                (body if name in _BESIDE_PARAMETERS else parameters)[name] = value
    else:
        body.update(target.fields)
    return msgspec.json.encode(body)


def _fields_of(target: Target, model: str | None, histories: Sequence[History], max_tokens: int) -> dict[str, Any]:
    prompts = ["".join(history) for history in histories]
    if target.api is ApiFormat.GENERATE_STREAM:
        return {"prompt": prompts[0], "max_tokens": max_tokens, "ignore_eos": True}
    if target.api is ApiFormat.GENERATE:
        return {"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": True}
    if target.api is ApiFormat.TGI:
        # `ignore_eos` is servekit's; TGI ignores fields that it does not know.
        parameters = {"max_new_tokens": max_tokens, "details": True, "ignore_eos": True}
        return {"inputs": prompts[0], "parameters": parameters}
    fields: dict[str, Any] = {} if model is None else {"model": model}
    if target.api is ApiFormat.COMPLETIONS:
        fields["prompt"] = prompts[0]
    else:
        roles = ("user", "assistant")
        fields["messages"] = [{"role": roles[n % 2], "content": said} for n, said in enumerate(histories[0])]
    # The older name of `max_completion_tokens`, which more servers know.
    return fields | {
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
