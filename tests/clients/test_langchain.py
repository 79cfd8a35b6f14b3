"""LangChain's models, with the server's address and otherwise their defaults.

The packages take seconds to import. So they are imported by the tests that run, and not by each process that collects
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import httpx2
import pytest
from pydantic import BaseModel, SecretStr

from tests.support.server_process import ServerProcess

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI, OpenAI

SKY = "What color is the sky?"
CAT = "How many legs does a cat have?"


class Animal(BaseModel):
    """An animal."""

    legs: Literal[2, 4]
    tame: bool


def settings(server: ServerProcess) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": SecretStr("none"), "model": "demo", "max_retries": 0}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    """LangChain closes no connection of its own making, which the garbage collector then complains of."""
    with httpx2.Client(timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def chat(server: ServerProcess, http: httpx2.Client) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(http_client=http, **settings(server))


@pytest.fixture(scope="module")
def llm(server: ServerProcess, http: httpx2.Client) -> OpenAI:
    """Its own default is a temperature of 0.7."""
    from langchain_openai import OpenAI

    return OpenAI(http_client=http, temperature=0, **settings(server))


def test_a_chat(chat: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage

    answer = chat.invoke([SystemMessage("You are terse."), HumanMessage(SKY)])
    assert answer.content == "The sky is blue."
    assert answer.response_metadata["finish_reason"] == "stop" and answer.response_metadata["model_name"] == "demo"
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] == 6


def test_a_streamed_chat(chat: ChatOpenAI) -> None:
    pieces = list(chat.stream(SKY, stream_usage=True))
    assert len(pieces) > 5 and "".join(str(piece.content) for piece in pieces) == "The sky is blue."
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert len(usages) == 1 and usages[0]["output_tokens"] == 6


def test_a_batch_of_chats(chat: ChatOpenAI) -> None:
    answers = chat.batch([SKY, CAT] * 4)
    assert [answer.content for answer in answers] == ["The sky is blue.", "A cat has four legs."] * 4


def test_logprobs_of_a_chat(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2, max_completion_tokens=4).invoke(SKY)
    logprobs = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in logprobs) == answer.content and len(logprobs[0]["top_logprobs"]) == 2


@pytest.mark.parametrize("fields", [{}, {"method": "json_schema", "include_raw": True}])
def test_structured_output(chat: ChatOpenAI, fields: dict[str, Any]) -> None:
    answer: Any = chat.with_structured_output(Animal, **fields).invoke(CAT)
    if fields:
        assert answer["parsing_error"] is None
        answer = answer["parsed"]
    assert isinstance(answer, Animal)


def test_tools(chat: ChatOpenAI) -> None:
    demanded: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    answer: Any = chat.bind_tools([Animal], **demanded).invoke(CAT)
    (call,) = answer.tool_calls
    assert call["name"] == "Animal" and Animal.model_validate(call["args"])
    total: Any
    total, *more = chat.bind_tools([Animal], **demanded).stream(CAT)
    for chunk in more:
        total = total + chunk
    assert total.tool_calls[0]["args"] == call["args"] and len(more) > 5
    found = chat.with_structured_output(Animal, method="function_calling").invoke(CAT)
    assert isinstance(found, Animal)


def test_a_prompt_that_is_too_long_is_known_as_such(chat: ChatOpenAI) -> None:
    """LangChain looks for what it knows in the *message*: `context_length_exceeded`, or "prompt is too long"."""
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        chat.invoke("word " * 5000)
    with pytest.raises(ContextOverflowError):
        list(chat.stream("word " * 5000))


def test_a_text_model(llm: OpenAI) -> None:
    assert llm.invoke(SKY) == "".join(llm.stream(SKY)) == " The sky is blue."
    assert llm.batch([SKY, CAT]) == [" The sky is blue.", " A cat has four legs."], "one request with two prompts"
    result = llm.generate([SKY, CAT])
    assert [generations[0].text for generations in result.generations] == [" The sky is blue.", " A cat has four legs."]
    assert result.llm_output and result.llm_output["token_usage"]["completion_tokens"] == 6 + 7
    assert llm.invoke(SKY, stop=["blue"]) == " The sky is "


async def test_without_blocking(server: ServerProcess, http: httpx2.Client) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    async with httpx2.AsyncClient(timeout=60) as async_http:
        chat = ChatOpenAI(http_client=http, http_async_client=async_http, **settings(server))
        assert (await chat.ainvoke(SKY)).content == "The sky is blue."
        assert "".join([str(piece.content) async for piece in chat.astream(SKY)]) == "The sky is blue."
        llm = OpenAI(http_client=http, http_async_client=async_http, temperature=0, **settings(server))
        assert await llm.ainvoke(SKY) == " The sky is blue."
