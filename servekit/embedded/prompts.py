"""Define the forms of a prompt: a text, token ids, or a dictionary with either, as in vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from servekit.errors import InvalidRequest
from servekit.requests.generation import Prompt

# "a text", [1, 2, 3], {"prompt": "a text"} or {"prompt_token_ids": [1, 2, 3]}
PromptInput: TypeAlias = str | Sequence[int] | Mapping[str, Any]


def to_prompt(value: PromptInput) -> Prompt:
    """Return a prompt in the form of requests. Raises InvalidRequest."""
    content: Any = value
    if isinstance(value, Mapping):
        content = value.get("prompt_token_ids", value.get("prompt"))
    if isinstance(content, str):
        return Prompt(content, "prompt")
    try:
        if isinstance(content, bytes | bytearray | memoryview):
            raise TypeError("array() would take this memory as integers")
        token_ids = array("i", content)
    except (TypeError, OverflowError):
        raise InvalidRequest(
            f"a prompt is a text, a list of token ids, or a dictionary with 'prompt' or 'prompt_token_ids'; this is "
            f"{repr(value)[:80]}",
            param="prompt",
        ) from None
    if token_ids and min(token_ids) < 0:
        raise InvalidRequest(f"a prompt has the token {min(token_ids)}; token ids begin at 0", param="prompt")
    return Prompt(token_ids, "prompt")


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, and not several: a text, or a dictionary."""
    return isinstance(prompts, str | Mapping)
