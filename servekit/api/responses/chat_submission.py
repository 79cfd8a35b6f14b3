"""Submit a chat, in whichever wire format it came: render its conversation, and find the form of its answers.

Every wire format of chats is turned into a ChatCompletionRequest, which has all that a chat can ask for.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from servekit.api.endpoint import caller_of, engine_of
from servekit.api.responses.generation import submit
from servekit.api.schemas.openai import ChatCompletionRequest
from servekit.engine.interface import GeneratingEngine
from servekit.engine.request_state import RequestState
from servekit.parsing.chat_format import PARSED_ANSWERS, AnswerFormat
from servekit.requests.generation import GenerationRequest

Conversation = list[dict[str, Any]]  # messages as chat templates expect them


async def submit_chat(
    request: Request, wanted: ChatCompletionRequest, conversation: Conversation
) -> tuple[RequestState, AnswerFormat]:
    """Admit a chat, and return the form of its answers, too. `conversation` stands for the messages of `wanted`.

    Raises what `submit` raises.
    """
    engine = engine_of(request)
    if engine.takes_messages:
        return await submit(request, wanted.to_relayed_request(conversation)), PARSED_ANSWERS
    chat = _Chat(engine, caller_of(request).tenant, wanted, conversation)
    state = await submit(request, wanted.to_generation_request(""), chat.render)
    assert chat.answer_format is not None, "it was rendered"
    return state, chat.answer_format


def may_reason(engine: GeneratingEngine) -> bool:
    """Whether the model writes reasoning, as far as is known here."""
    return engine.takes_messages or engine.input_processor.chat_format.has_reasoning


async def render(
    engine: GeneratingEngine, tenant: str, wanted: ChatCompletionRequest, conversation: Conversation
) -> str:
    """Return the text of the prompt. Raises InvalidRequest."""
    return await engine.input_processor.render_chat(
        tenant,
        conversation,
        wanted.chat_template,
        wanted.template_variables(),
        wanted.add_generation_prompt is not False,
        bool(wanted.continue_final_message),
        wanted.tools_for_template(),
    )


class _Chat:
    """One conversation. The end of its rendered text decides in which form the answer begins."""

    def __init__(
        self, engine: GeneratingEngine, tenant: str, wanted: ChatCompletionRequest, conversation: Conversation
    ) -> None:
        self._engine = engine
        self._tenant = tenant
        self._wanted = wanted
        self._conversation = conversation
        self._tool_use = wanted.tool_use()
        self.answer_format: AnswerFormat | None = None

    async def render(self) -> GenerationRequest:
        """Return the request with the rendered conversation. Raises InvalidRequest."""
        wanted, chat_format = self._wanted, self._engine.input_processor.chat_format
        chat_format.check_tools(self._tool_use)
        text = await render(self._engine, self._tenant, wanted, self._conversation)
        self.answer_format = chat_format.for_answers(
            text, self._tool_use, wanted.grammar(), wanted.max_reasoning_tokens
        )
        return wanted.to_generation_request(text, self.answer_format)
