"""Prepare a conversation for its next message. The model's chat template makes the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from servekit.api.schemas.json_body import decode
from servekit.api.schemas.openai import ChatCompletionRequest
from servekit.engine.input_processor import InputProcessor
from servekit.errors import InvalidRequest
from servekit.parsing.chat_format import AnswerFormat
from servekit.requests.generation import GenerationRequest, Prompt

PLACEHOLDER = Prompt("", "messages", add_special_tokens=False)  # the template contains the special tokens


class Conversation:
    """The messages, and the options of the chat template."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        """`options` are fields of /v1/chat/completions. Raises InvalidRequest."""
        given = {name: value for name, value in options.items() if value is not None}
        try:
            body = msgspec.json.encode({"messages": messages, **given})
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"messages: {error}", param="messages") from None
        self._wanted = decode(body, ChatCompletionRequest)
        self._wanted.check()

    async def render(
        self, processor: InputProcessor, tenant: str, request: GenerationRequest
    ) -> tuple[GenerationRequest, AnswerFormat]:
        """Return the request with the rendered conversation, and the format of the answers. Raises InvalidRequest."""
        wanted, use = self._wanted, self._wanted.tool_use()
        processor.chat_format.check_tools(use)
        text = await processor.render_chat(
            tenant,
            wanted.conversation(),
            wanted.chat_template,
            wanted.template_variables(),
            wanted.add_generation_prompt is not False,
            bool(wanted.continue_final_message),
            wanted.tools_for_template(),
        )
        answer_format = processor.chat_format.for_answers(text, use, request.grammar, wanted.max_reasoning_tokens)
        prompts = [replace(PLACEHOLDER, content=text)]
        rendered = replace(request, prompts=prompts, grammar=answer_format.grammar, markers=answer_format.markers)
        return rendered, answer_format
