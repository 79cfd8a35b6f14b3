"""Render a conversation with a chat template. Runs only in a sandbox process, because templates are programs.

The renderer is that of transformers, which runs Jinja in Jinja's own sandbox, so the text equals that of training.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2

from servekit.protocol.light_imports import bare_packages
from servekit.sandbox.jobs import DoneLong, Outcome, Refused, RenderChat

try:
    # The renderer needs little of transformers, all of which takes half a second to import.
    with bare_packages("transformers", "transformers.utils"):
        from transformers.utils.chat_template_utils import render_jinja_template
except (ImportError, AttributeError):  # another version of transformers needs more
    from transformers.utils.chat_template_utils import render_jinja_template


def render_chat(job: RenderChat) -> Outcome:
    """Return the conversation as text, or the reason why the template refuses it."""
    try:
        try:
            rendered = _render(job, job.messages)
        except TypeError:
            # Most templates take the arguments of earlier tool calls as objects. Some, such as DeepSeek's, join them
            # with other text, and need them as text, too.
            messages = [_with_arguments_as_text(message) for message in job.messages]
            if messages == job.messages:
                raise
            rendered = _render(job, messages)
        return DoneLong(memoryview(rendered.encode()))
    except (jinja2.TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        return Refused(f"the chat template refuses these messages: {error}")


def _render(job: RenderChat, messages: list[dict[str, Any]]) -> str:
    # Its annotations are wrong: it returns a list of texts, and the spans of assistant turns.
    rendered: Any = render_jinja_template(
        [messages],
        chat_template=job.template,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        **job.variables,
    )
    text: str = rendered[0][0]
    return text


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": [_call_with_text(call) for call in calls]}


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
