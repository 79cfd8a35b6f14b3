"""Call a server with the clients that people have, and write into docs/clients.md what works and what is refused.

`python -m tests.clients.matrix` starts a server with the demo model and makes every call; `--write` then writes the
tables of the page. The command fails, and writes nothing, if one call does not do what its row says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2
from huggingface_hub import AsyncInferenceClient, InferenceClient
from ollama import AsyncClient as AsyncOllama
from ollama import Client as Ollama
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from scripts.tables import with_table
from tests.support.server_process import serving

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
MAKER = "python -m tests.clients.matrix --write"

SKY, CAT = "What color is the sky?", "How many legs does a cat have?"
BLUE, LEGS = "The sky is blue.", "A cat has four legs."
USER: list[Any] = [{"role": "user", "content": SKY}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"legs": {"enum": [2, 4]}},
    "required": ["legs"],
    "additionalProperties": False,
}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
TOOL: Any = {"type": "function", "function": {"name": "count_legs", "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "count_legs", "parameters": SCHEMA, "strict": True}
REQUIRED: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
# The tool that the demo model was taught.
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
FOUND = '{"query": "weather in Rome"}'
QUERY: dict[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH: Any = {"type": "function", "function": {"name": "search", "parameters": QUERY}}
RESPONSES_SEARCH: Any = {"type": "function", "name": "search", "parameters": QUERY, "strict": False}
ANTHROPIC_SEARCH: Any = {"name": "search", "input_schema": QUERY}
PICTURE: list[Any] = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
]


class Animal(BaseModel):
    """An animal."""

    legs: Literal[2, 4]


class Clients:
    """All clients of one server."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        # They take seconds to import, which each process that collects the tests would do.
        from anthropic import Anthropic
        from langchain_openai import ChatOpenAI
        from langchain_openai import OpenAI as LangChainOpenAI

        self.url = url
        self.http = stack.enter_context(httpx2.Client(base_url=url, timeout=60))
        self.openai = stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60))
        self.hf = stack.enter_context(InferenceClient(url, timeout=60))
        self.anthropic = stack.enter_context(Anthropic(base_url=url, api_key="any", max_retries=0, timeout=60))
        self.ollama = stack.enter_context(Ollama(url, timeout=60))
        settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": SecretStr("any"), "model": "demo"}
        settings |= {"max_retries": 0, "temperature": 0, "http_client": stack.enter_context(httpx2.Client(timeout=60))}
        self.langchain = ChatOpenAI(**settings)
        self.langchain_text = LangChainOpenAI(**settings)

    def curl(self, path: str, body: Any = None) -> Any:
        """Return the JSON that curl prints, or its lines of JSON. Raises Refused for an error."""
        command = ["curl", "-sS", "--max-time", "60", self.url + path]
        if body is not None:
            command += ["-d", json.dumps(body)]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{", "["))]
        values = [json.loads(line) for line in lines]
        for value in values:
            if isinstance(value, dict) and "error" in value:
                raise Refused(value["error"] if isinstance(value["error"], str) else value["error"]["message"])
        return values if len(values) > 1 else values[0] if values else text

    def abort_a_stream(self, name: str) -> bool:
        body = {"prompt": SKY, "max_tokens": 1500, "ignore_eos": True, "temperature": 1}
        headers = {"x-request-id": "matrix"}
        with self.http.stream("POST", "/generate_stream", json=body, headers=headers) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            aborted = self.curl("/abort_request", {name: "matrix"})
            *_, last = lines
        return aborted == {"num_aborted": 1} and '"finish_reason":"abort"' in last

    def chat(self, **fields: Any) -> Any:
        return self.openai.chat.completions.create(model="demo", messages=fields.pop("messages", USER), **fields)

    def respond(self, **fields: Any) -> Any:
        return self.openai.responses.create(model="demo", input=fields.pop("input", SKY), store=False, **fields)

    def message(self, **fields: Any) -> Any:
        fields = {"model": "demo", "max_tokens": 60, "messages": USER, **fields}
        return self.anthropic.messages.create(**fields)

    def complete(self, **fields: Any) -> Any:
        return self.openai.completions.create(model="demo", prompt=fields.pop("prompt", SKY), **fields)


class Refused(Exception):
    """The server refused what curl sent."""


class Call(NamedTuple):
    """One row. `run` returns whether the answer is right. `refusal` is part of the message of one that is refused."""

    client: str
    name: str
    run: Callable[[Clients], Any]
    refusal: str = ""

    @property
    def outcome(self) -> str:
        return f"refused: “{self.refusal}”" if self.refusal else "works"

    def check(self, clients: Clients) -> None:
        """Make the call. Raises AssertionError if it does not do what the row says."""
        try:
            answer = self.run(clients)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            assert self.refusal, f"{self.client}, {self.name}: {message}"
            assert self.refusal in message, f"{self.client}, {self.name}: refused in other words: {message}"
            return
        assert not self.refusal, f"{self.client}, {self.name}: it is not refused, but answered {answer}"
        assert answer, f"{self.client}, {self.name}: the answer is wrong"


def joined(parts: Any) -> str:
    """Return the text of the chunks of one of OpenAI's streams."""
    return "".join((chunk.choices[0].delta.content or "") for chunk in parts if chunk.choices)


async def _ask_openai(url: str) -> bool:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        answer = await client.chat.completions.create(model="demo", messages=USER)
        return answer.choices[0].message.content == BLUE


async def _ask_hugging_face(url: str) -> bool:
    async with AsyncInferenceClient(url, timeout=60) as client:
        return "".join([text async for text in await client.text_generation(SKY, stream=True)]) == f" {BLUE}"


async def _ask_ollama(url: str) -> bool:
    async with AsyncOllama(url, timeout=60) as client:
        return (await client.chat("demo", USER)).message.content == BLUE


def _anthropic_arguments(clients: Clients) -> str:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 60, "messages": WEATHER, "tools": [ANTHROPIC_SEARCH]}
    with clients.anthropic.messages.stream(**fields) as stream:
        return "".join(event.partial_json for event in stream if event.type == "input_json")


def _anthropic_stream(clients: Clients) -> str:
    with clients.anthropic.messages.stream(model="demo", max_tokens=20, messages=USER) as stream:
        return "".join(stream.text_stream)


def _parsed(clients: Clients) -> Any:
    message = clients.openai.chat.completions.parse(model="demo", messages=USER, response_format=Animal)
    return message.choices[0].message.parsed


def _streamed_events(clients: Clients) -> bool:
    with clients.openai.chat.completions.stream(model="demo", messages=USER) as stream:
        kinds = {event.type for event in stream}
        return "content.delta" in kinds and stream.get_final_completion().choices[0].message.content == BLUE


def _streamed_arguments(chunks: Any) -> str:
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    return "".join(call.function.arguments or "" for call in calls)


def _batch_of_one(clients: Clients) -> bool:
    """Whether a batch with one line is answered. It runs when nothing else does."""
    api = clients.openai
    question = {"custom_id": "sky", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": USER}}
    file = api.files.create(file=("requests.jsonl", json.dumps(question).encode()), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline_s = time.monotonic() + 60
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.1)
        batch = api.batches.retrieve(batch.id)
    return BLUE in api.files.content(batch.output_file_id or "").text


CURL = [
    Call("curl", "`POST /generate`", lambda c: c.curl("/generate", {"prompt": SKY})["generated_text"] == f" {BLUE}"),
    Call(
        "curl",
        "`POST /generate`, several `prompts`",
        lambda c: c.curl("/generate", {"prompts": [SKY, CAT]})["generated_texts"] == [f" {BLUE}", f" {LEGS}"],
    ),
    Call(
        "curl",
        "`POST /generate`, `max_new_tokens`",
        lambda c: c.curl("/generate", {"prompt": SKY, "max_new_tokens": 2})["generated_text"] == " The sky",
    ),
    Call(
        "curl", "`POST /generate`, `stream`", lambda c: len(c.curl("/generate", {"prompt": SKY, "stream": True})) == 6
    ),
    Call(
        "curl",
        "`POST /generate`, `grammar`",
        lambda c: c.curl("/generate", {"prompt": SKY, "grammar": {"type": "choice", "value": ["red", "sad"]}}),
    ),
    Call("curl", "`POST /generate_stream`", lambda c: len(c.curl("/generate_stream", {"prompt": SKY})) == 6),
    Call("curl", "`GET /generate_stream`", lambda c: len(c.curl("/generate_stream?prompt=Hi&max_tokens=3")) == 3),
    Call("curl", "`POST /basic_generate`", lambda c: c.curl("/basic_generate", {"prompt": SKY})["generated_text"]),
    Call("curl", "`POST /abort_request`", lambda c: c.abort_a_stream("rid")),
    Call("curl", "`POST /abort_request`, `request_id`", lambda c: c.abort_a_stream("request_id")),
    Call("curl", "`POST /v1/completions`", lambda c: c.curl("/v1/completions", {"prompt": SKY})["choices"]),
    Call("curl", "`POST /v1/chat/completions`", lambda c: c.curl("/v1/chat/completions", {"messages": USER})["usage"]),
    Call("curl", "`GET /v1/models`", lambda c: c.curl("/v1/models")["data"][0]["id"] == "demo"),
    Call("curl", "`GET /v1/models/demo`", lambda c: c.curl("/v1/models/demo")["max_model_len"] == 2048),
    Call("curl", "`POST /tokenize`", lambda c: c.curl("/tokenize", {"prompt": SKY})["count"] == 7),
    Call("curl", "`POST /detokenize`", lambda c: c.curl("/detokenize", {"tokens": [293]})["prompt"] == " The"),
    Call("curl", "`GET /version`, `/info`", lambda c: c.curl("/version")["version"] and c.curl("/info")["model_name"]),
    Call("curl", "`GET /metrics`", lambda c: "servekit_" in c.curl("/metrics")),
    Call("curl", "`POST /generate`, a misspelt field", lambda c: c.curl("/generate", {"promt": "a"}), "unknown field"),
]
TGI: list[Call] = [
    Call("TGI's clients", "`POST /`", lambda c: c.curl("/", {"inputs": SKY})[0]["generated_text"] == f" {BLUE}"),
    Call(
        "TGI's clients",
        "`POST /generate`, `details`",
        lambda c: c.curl("/generate", {"inputs": SKY, "parameters": {"details": True}})["details"]["tokens"],
    ),
    Call("TGI's clients", "`POST /generate_stream`", lambda c: len(c.curl("/generate_stream", {"inputs": SKY})) == 6),
    Call("TGI's clients", "`POST /tokenize`", lambda c: len(c.curl("/tokenize", {"inputs": SKY})[0]) == 4),
    Call("TGI's clients", "`GET /info`", lambda c: c.curl("/info")["max_input_tokens"] == 2047),
]
OPENAI = [
    Call("openai", "`completions.create`", lambda c: c.complete().choices[0].text == f" {BLUE}"),
    Call(
        "openai",
        "`completions.create`, several prompts, `n`",
        lambda c: len(c.complete(prompt=[SKY, CAT], n=2).choices) == 4,
    ),
    Call("openai", "`completions.create`, token ids", lambda c: c.complete(prompt=[1, 293]).usage.prompt_tokens == 2),
    Call("openai", "`completions.create`, `best_of`", lambda c: len(c.complete(best_of=3, temperature=1).choices) == 1),
    Call("openai", "`completions.create`, `echo`", lambda c: c.complete(echo=True).choices[0].text == f"{SKY} {BLUE}"),
    Call(
        "openai",
        "`completions.create`, `echo` with `logprobs` and no new tokens",
        lambda c: len(c.complete(echo=True, logprobs=1, max_tokens=0).choices[0].logprobs.tokens) == 7,
    ),
    Call(
        "openai",
        "`completions.create`, `logit_bias`",
        lambda c: not c.complete(logit_bias={"293": -100}).choices[0].text.startswith(" The"),
    ),
    Call(
        "openai",
        "`completions.create`, `stream`",
        lambda c: "".join(chunk.choices[0].text for chunk in c.complete(stream=True)) == f" {BLUE}",
    ),
    Call(
        "openai",
        "`completions.create`, vLLM's fields in `extra_body`",
        lambda c: c.complete(extra_body={"structured_outputs": {"choice": ["red"]}}).choices[0].text == "red",
    ),
    Call(
        "openai",
        "`completions.create`, vLLM's `return_token_ids`",
        lambda c: len(c.complete(extra_body={"return_token_ids": True}).choices[0].token_ids) == 6,
    ),
    Call("openai", "`completions.create`, `suffix`", lambda c: c.complete(suffix="."), "no tokens for filling in text"),
    Call("openai", "`chat.completions.create`", lambda c: c.chat().choices[0].message.content == BLUE),
    Call("openai", "`chat.completions.create`, `stream`", lambda c: joined(c.chat(stream=True)) == BLUE),
    Call(
        "openai",
        "`chat.completions.create`, `stream_options`",
        lambda c: list(c.chat(stream=True, stream_options={"include_usage": True}))[-1].usage,
    ),
    Call(
        "openai",
        "`chat.completions.create`, `n`, `seed`",
        lambda c: len(c.chat(n=3, seed=1, temperature=1).choices) == 3,
    ),
    Call(
        "openai",
        "`chat.completions.create`, `stop`",
        lambda c: c.chat(stop=[" blue"]).choices[0].message.content == "The sky is",
    ),
    Call(
        "openai",
        "`chat.completions.create`, `logprobs`",
        lambda c: len(c.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content) == 6,
    ),
    Call(
        "openai",
        "`chat.completions.create`, `response_format`",
        lambda c: json.loads(c.chat(response_format=JSON_SCHEMA).choices[0].message.content)["legs"] in (2, 4),
    ),
    Call(
        "openai",
        "`chat.completions.create`, `prediction`",
        lambda c: c.chat(prediction={"type": "content", "content": BLUE}).choices[0].message.content == BLUE,
    ),
    Call(
        "openai",
        "`chat.completions.create`, `tools`, `tool_choice` `required`",
        lambda c: c.chat(**REQUIRED).choices[0].message.tool_calls[0].function.name == "count_legs",
    ),
    Call(
        "openai",
        "`chat.completions.create`, `tools`, `tool_choice` `required`, `stream`",
        # A stream is read to its end: one that is left keeps its connection open.
        lambda c: json.loads(_streamed_arguments(c.chat(stream=True, **REQUIRED)))["legs"] in (2, 4),
    ),
    Call(
        "openai",
        "`chat.completions.create`, `tools`, by the model's own choice",
        lambda c: c.chat(messages=WEATHER, tools=[SEARCH]).choices[0].message.tool_calls[0].function.arguments == FOUND,
    ),
    Call(
        "openai",
        "`chat.completions.create`, `tools`, by the model's own choice, `stream`",
        lambda c: _streamed_arguments(c.chat(messages=WEATHER, tools=[SEARCH], stream=True)) == FOUND,
    ),
    Call("openai", "`chat.completions.create`, an image", lambda c: c.chat(messages=PICTURE), "supports text only"),
    Call("openai", "`chat.completions.parse`", _parsed),
    Call("openai", "`chat.completions.stream`", _streamed_events),
    Call("openai", "`responses.create`", lambda c: c.respond().output_text == BLUE),
    Call(
        "openai",
        "`responses.create`, `stream`",
        lambda c: "".join(x.delta for x in c.respond(stream=True) if x.type == "response.output_text.delta") == BLUE,
    ),
    Call(
        "openai",
        "`responses.create`, `tools`, `tool_choice` `required`",
        lambda c: c.respond(tools=[RESPONSES_TOOL], tool_choice="required", parallel_tool_calls=False).output[0].name,
    ),
    Call(
        "openai",
        "`responses.create`, `tools`, by the model's own choice",
        lambda c: c.respond(input=WEATHER, tools=[RESPONSES_SEARCH]).output[0].arguments == FOUND,
    ),
    Call(
        "openai",
        "`responses.create`, `tools`, by the model's own choice, `stream`",
        lambda c: (
            "".join(
                event.delta
                for event in c.respond(input=WEATHER, tools=[RESPONSES_SEARCH], stream=True)
                if event.type == "response.function_call_arguments.delta"
            )
            == FOUND
        ),
    ),
    Call("openai", "`models.list`", lambda c: [model.id for model in c.openai.models.list()] == ["demo"]),
    Call("openai", "`models.retrieve`", lambda c: c.openai.models.retrieve("demo").owned_by == "servekit"),
    Call("openai", "`models.retrieve`, another model", lambda c: c.openai.models.retrieve("gpt-5"), "does not exist"),
    Call(
        "openai",
        "`with_raw_response`",
        lambda c: c.openai.completions.with_raw_response.create(model="demo", prompt=SKY).parse().choices,
    ),
    Call("openai", "`files.create`, `batches.create`, `batches.retrieve`, `files.content`", _batch_of_one),
    Call("openai", "`files.list`", lambda c: c.openai.files.list().data),
    Call("openai", "`batches.list`", lambda c: c.openai.batches.list().data),
    Call("openai", "`AsyncOpenAI`", lambda c: asyncio.run(_ask_openai(c.url))),
    Call(
        "openai",
        "`embeddings.create`, of a model that generates",
        lambda c: c.openai.embeddings.create(model="demo", input="a"),
        "computes no embeddings",
    ),
    Call("openai", "`images.generate`", lambda c: c.openai.images.generate(prompt="a"), "there is no route"),
    Call("openai", "`moderations.create`", lambda c: c.openai.moderations.create(input="a"), "there is no route"),
]
HUGGING_FACE = [
    Call("huggingface_hub", "`text_generation`", lambda c: c.hf.text_generation(SKY) == f" {BLUE}"),
    Call(
        "huggingface_hub",
        "`text_generation`, `details`",
        lambda c: c.hf.text_generation(SKY, details=True, decoder_input_details=True).details.prefill,
    ),
    Call(
        "huggingface_hub",
        "`text_generation`, `stream`",
        lambda c: "".join(c.hf.text_generation(SKY, stream=True)) == f" {BLUE}",
    ),
    Call(
        "huggingface_hub",
        "`text_generation`, `grammar`",
        lambda c: json.loads(c.hf.text_generation(SKY, grammar={"type": "json", "value": SCHEMA})),
    ),
    Call(
        "huggingface_hub",
        "`text_generation`, `best_of`",
        lambda c: c.hf.text_generation(SKY, best_of=2, do_sample=True, seed=1, details=True).details.best_of_sequences,
    ),
    Call(
        "huggingface_hub",
        "`text_generation`, `stop`, `return_full_text`",
        lambda c: c.hf.text_generation(SKY, stop=["blue"], return_full_text=True) == f"{SKY} The sky is ",
    ),
    Call(
        "huggingface_hub",
        "`text_generation`, `adapter_id`",
        lambda c: c.hf.text_generation(SKY, adapter_id="mine"),
        "no adapters",
    ),
    Call(
        "huggingface_hub", "`chat_completion`", lambda c: c.hf.chat_completion(USER).choices[0].message.content == BLUE
    ),
    Call(
        "huggingface_hub",
        "`chat_completion`, `stream`",
        lambda c: joined(c.hf.chat_completion(USER, stream=True)) == BLUE,
    ),
    Call(
        "huggingface_hub",
        "`chat_completion`, `response_format`",
        lambda c: json.loads(c.hf.chat_completion(USER, response_format=JSON_SCHEMA).choices[0].message.content),
    ),
    Call("huggingface_hub", "`AsyncInferenceClient`", lambda c: asyncio.run(_ask_hugging_face(c.url))),
    Call(
        "huggingface_hub",
        "`feature_extraction`, of a model that generates",
        lambda c: c.hf.feature_extraction("a"),
        "feature_extraction",
    ),
    Call("huggingface_hub", "`text_to_image`", lambda c: c.hf.text_to_image("a"), "text_to_image"),
    Call(
        "huggingface_hub",
        "`question_answering`",
        lambda c: c.hf.question_answering(question="Who?", context="Ann."),
        "question_answering",
    ),
]
LANGCHAIN = [
    Call("langchain-openai", "`ChatOpenAI.invoke`", lambda c: c.langchain.invoke(SKY).content == BLUE),
    Call(
        "langchain-openai",
        "`ChatOpenAI.stream`",
        lambda c: "".join(str(x.content) for x in c.langchain.stream(SKY)) == BLUE,
    ),
    Call(
        "langchain-openai",
        "`ChatOpenAI.batch`",
        lambda c: [x.content for x in c.langchain.batch([SKY, CAT])] == [BLUE, LEGS],
    ),
    Call(
        "langchain-openai",
        "`ChatOpenAI.with_structured_output`",
        lambda c: isinstance(c.langchain.with_structured_output(Animal).invoke(CAT), Animal),
    ),
    Call(
        "langchain-openai",
        "`ChatOpenAI.bind_tools`, `tool_choice` `required`",
        lambda c: (
            c.langchain.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(CAT).tool_calls
        ),
    ),
    Call(
        "langchain-openai",
        "`ChatOpenAI.bind_tools`, by the model's own choice",
        lambda c: (
            c.langchain.bind_tools([SEARCH]).invoke("What is the weather in Rome?").tool_calls[0]["args"]
            == json.loads(FOUND)
        ),
    ),
    Call(
        "langchain-openai",
        "`ChatOpenAI.invoke`, too long",
        lambda c: c.langchain.invoke("word " * 5000),
        "ContextOverflowError",
    ),
    Call("langchain-openai", "`OpenAI.invoke`", lambda c: c.langchain_text.invoke(SKY) == f" {BLUE}"),
    Call("langchain-openai", "`OpenAI.stream`", lambda c: "".join(c.langchain_text.stream(SKY)) == f" {BLUE}"),
    Call(
        "langchain-openai", "`OpenAI.batch`", lambda c: c.langchain_text.batch([SKY, CAT]) == [f" {BLUE}", f" {LEGS}"]
    ),
]
OLLAMA = [
    Call("ollama", "`chat`", lambda c: c.ollama.chat("demo", USER).message.content == BLUE),
    Call(
        "ollama",
        "`chat`, `stream`",
        lambda c: "".join(x.message.content for x in c.ollama.chat("demo", USER, stream=True)) == BLUE,
    ),
    Call(
        "ollama", "`chat`, `format`", lambda c: json.loads(c.ollama.chat("demo", USER, format=SCHEMA).message.content)
    ),
    Call(
        "ollama",
        "`chat`, `options`",
        lambda c: (
            c.ollama.chat("demo", USER, options={"num_predict": 2, "num_ctx": 4096, "seed": 1}).done_reason == "length"
        ),
    ),
    Call(
        "ollama",
        "`chat`, `tools`, the option `tool_choice` `required`",
        lambda c: c.ollama.chat("demo", USER, tools=[TOOL], options={"tool_choice": "required"}).message.tool_calls,
    ),
    Call(
        "ollama",
        "`chat`, `tools`, by the model's own choice",
        lambda c: c.ollama.chat("demo", WEATHER, tools=[SEARCH]).message.tool_calls[0].function.arguments["query"],
    ),
    Call(
        "ollama",
        "`chat`, `tools`, by the model's own choice, `stream`",
        lambda c: (
            [
                call.function.arguments
                for part in c.ollama.chat("demo", WEATHER, tools=[SEARCH], stream=True)
                for call in part.message.tool_calls or ()
            ]
            == [json.loads(FOUND)]
        ),
    ),
    Call("ollama", "`chat`, `logprobs`", lambda c: len(c.ollama.chat("demo", USER, logprobs=True).logprobs) == 6),
    Call(
        "ollama",
        "`chat`, `think`, by a model that does not",
        lambda c: c.ollama.chat("demo", USER, think=True),
        "does not support thinking",
    ),
    Call(
        "ollama",
        "`chat`, an image",
        lambda c: c.ollama.chat("demo", [{**USER[0], "images": [b"x"]}]),
        "supports text only",
    ),
    Call("ollama", "`chat`, another model", lambda c: c.ollama.chat("llama3.2", USER), "does not exist"),
    Call("ollama", "`generate`", lambda c: c.ollama.generate("demo", SKY).response == BLUE),
    Call("ollama", "`generate`, `raw`", lambda c: c.ollama.generate("demo", SKY, raw=True).response == f" {BLUE}"),
    Call(
        "ollama",
        "`generate`, `stream`",
        lambda c: "".join(x.response for x in c.ollama.generate("demo", SKY, stream=True)) == BLUE,
    ),
    Call(
        "ollama",
        "`generate` to load the model",
        lambda c: c.ollama.generate("demo", keep_alive="5m").done_reason == "load",
    ),
    Call("ollama", "`list`", lambda c: [model.model for model in c.ollama.list().models] == ["demo"]),
    Call("ollama", "`ps`", lambda c: c.ollama.ps().models[0].context_length == 2048),
    Call("ollama", "`show`", lambda c: c.ollama.show("demo").capabilities == ["completion", "tools"]),
    Call("ollama", "`AsyncClient`", lambda c: asyncio.run(_ask_ollama(c.url))),
    Call("ollama", "`pull`", lambda c: c.ollama.pull("llama3.2"), "the operator names them"),
    Call("ollama", "`create`", lambda c: c.ollama.create("other", from_="demo"), "the operator names them"),
    Call("ollama", "`delete`", lambda c: c.ollama.delete("demo"), "the operator names them"),
    Call(
        "ollama", "`embed`, of a model that generates", lambda c: c.ollama.embed("demo", "a"), "computes no embeddings"
    ),
]
ANTHROPIC_TOOLS: Any = {
    "tools": [{"name": "count_legs", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
ANTHROPIC = [
    Call("anthropic", "`messages.create`", lambda c: c.message().content[0].text == BLUE),
    Call("anthropic", "`messages.create`, `system`", lambda c: c.message(system="You are terse.").usage.output_tokens),
    Call(
        "anthropic",
        "`messages.create`, `stop_sequences`",
        lambda c: c.message(stop_sequences=["blue"]).stop_reason == "stop_sequence",
    ),
    Call("anthropic", "`messages.create`, `max_tokens`", lambda c: c.message(max_tokens=2).stop_reason == "max_tokens"),
    Call(
        "anthropic",
        "`messages.create`, `stream`",
        lambda c: (
            {event.type for event in c.message(stream=True)} > {"message_start", "content_block_delta", "message_stop"}
        ),
    ),
    Call("anthropic", "`messages.stream`", lambda c: _anthropic_stream(c) == BLUE),
    Call(
        "anthropic",
        "`messages.create`, `tools`, `tool_choice` `any`",
        lambda c: c.message(**ANTHROPIC_TOOLS).content[0].name == "count_legs",
    ),
    Call(
        "anthropic",
        "`messages.create`, `tools`, by the model's own choice",
        lambda c: (
            c.message(messages=WEATHER, tools=[ANTHROPIC_SEARCH]).content[0].input == {"query": "weather in Rome"}
        ),
    ),
    Call(
        "anthropic",
        "`messages.stream`, `tools`, by the model's own choice",
        lambda c: _anthropic_arguments(c) == FOUND,
    ),
    Call(
        "anthropic",
        "`messages.count_tokens`",
        lambda c: c.anthropic.messages.count_tokens(model="demo", messages=USER).input_tokens == 10,
    ),
    Call("anthropic", "`messages.create`, another model", lambda c: c.message(model="claude-9"), "does not exist"),
    Call(
        "anthropic",
        "`messages.create`, an image",
        lambda c: c.message(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
                    ],
                }
            ]
        ),
        "image",
    ),
]
# lm-eval itself needs 600 MB of packages. These are the bodies that it sends; tests/clients/test_lm_eval.py runs it.
LM_EVAL = [
    Call(
        "lm-eval",
        "`local-completions`, `loglikelihood`",
        lambda c: c.curl(
            "/v1/completions",
            {
                "model": "demo",
                "prompt": [[293, 1125, 278]],
                "temperature": 0,
                "max_tokens": 1,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
            },
        )["choices"][0]["logprobs"]["token_logprobs"][1:],
    ),
    Call(
        "lm-eval",
        "`local-completions`, `generate_until`",
        lambda c: c.curl(
            "/v1/completions",
            {
                "model": "demo",
                "prompt": [[293, 1125]],
                "max_tokens": 32,
                "temperature": 0,
                "stop": ["\n"],
                "seed": 1234,
            },
        )["choices"][0]["text"],
    ),
    Call(
        "lm-eval",
        "`local-chat-completions`, `generate_until`",
        lambda c: (
            c.curl(
                "/v1/chat/completions",
                {"model": "demo", "messages": USER, "max_tokens": 32, "temperature": 0, "stop": ["\n"], "seed": 1234},
            )["choices"][0]["message"]["content"]
            == BLUE
        ),
    ),
]
CALLS = [*CURL, *TGI, *OPENAI, *HUGGING_FACE, *LANGCHAIN, *OLLAMA, *ANTHROPIC, *LM_EVAL]


class Missing(NamedTuple):
    """What another server's API has and this one refuses: a request for it, and why it is refused."""

    peer: str
    feature: str
    path: str
    body: dict[str, Any]
    refusal: str
    reason: str

    def check(self, clients: Clients) -> None:
        """Send the request. Raises AssertionError unless it is refused in these words."""
        Call(self.peer, self.feature, lambda c: c.curl(self.path, self.body), self.refusal).check(clients)


CHAT = "/v1/chat/completions"
IMAGE = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}]
_BY_THE_OPERATOR = "The operator chooses the models (`--models`); clients cannot add or remove them."
_ONLY_TEXT = "The models that are served read and write text."
_NO_POOLING = "Models that embed, rerank or classify have [routes of their own](embeddings.md)."
MISSING = [
    Missing(
        "OpenAI", "images, audio and files in messages", CHAT, {"messages": PICTURE}, "supports text only", _ONLY_TEXT
    ),
    Missing(
        "OpenAI",
        "`modalities` with audio",
        CHAT,
        {"messages": USER, "modalities": ["audio"]},
        "generates text only",
        _ONLY_TEXT,
    ),
    Missing(
        "OpenAI",
        "`functions`, `function_call`",
        CHAT,
        {"messages": USER, "functions": [{"name": "f"}]},
        "send tools",
        "They are the older form of `tools`, which OpenAI has deprecated, too. Send `tools`.",
    ),
    Missing(
        "OpenAI",
        "`/v1/moderations`",
        "/v1/moderations",
        {"input": "a"},
        "there is no route",
        "Models that classify texts have `/predict` ([embeddings.md](embeddings.md)).",
    ),
    Missing("OpenAI", "`/v1/audio/transcriptions`", "/v1/audio/transcriptions", {}, "there is no route", _ONLY_TEXT),
    Missing(
        "OpenAI", "`/v1/images/generations`", "/v1/images/generations", {"prompt": "a"}, "there is no route", _ONLY_TEXT
    ),
    Missing(
        "OpenAI",
        "`/v1/fine_tuning/jobs`",
        "/v1/fine_tuning/jobs",
        {},
        "there is no route",
        "The server does not train.",
    ),
    Missing(
        "OpenAI",
        "`web_search_options`",
        CHAT,
        {"messages": USER, "web_search_options": {"search_context_size": "low"}},
        "web_search_options is not supported",
        "The server runs no tools. Clients run them, and send what they found.",
    ),
    Missing(
        "OpenAI",
        "Responses: `background`, `previous_response_id`, `conversation`, `prompt`, `GET /v1/responses/{id}`",
        "/v1/responses",
        {"model": "demo", "input": "a", "previous_response_id": "resp_1"},
        "stores no responses",
        "The server stores no conversations. Send the conversation again: the prefix cache avoids computing it twice.",
    ),
    Missing(
        "OpenAI",
        "Responses: `top_logprobs`",
        "/v1/responses",
        {"model": "demo", "input": "a", "top_logprobs": 2},
        "top_logprobs is not supported",
        "Use `logprobs` of `/v1/chat/completions`.",
    ),
    Missing(
        "OpenAI",
        "`/v1/responses/input_tokens`",
        "/v1/responses/input_tokens",
        {"model": "demo", "input": "a"},
        "there is no route",
        "`/v1/messages/count_tokens` counts the tokens of a conversation.",
    ),
    Missing(
        "OpenAI",
        "Responses: `web_search`, `file_search`, `code_interpreter`, `mcp` and other tools of the server",
        "/v1/responses",
        {"model": "demo", "input": "a", "tools": [{"type": "web_search"}]},
        "runs no tools",
        "Clients run tools, and send what these answered.",
    ),
    Missing(
        "OpenAI",
        "`/v1/assistants`, `/v1/threads`, `/v1/conversations`, `/v1/vector_stores`, `/v1/uploads`, `/v1/realtime`",
        "/v1/conversations",
        {"items": []},
        "there is no route",
        "The server stores no conversations. Files are for [batches](batches.md).",
    ),
    Missing(
        "OpenAI",
        "`best_of` in a stream",
        "/v1/completions",
        {"prompt": "a", "best_of": 2, "stream": True},
        "cannot be streamed",
        "The best answer is known only when all have ended. Leave out `stream`, or stream all `n` answers.",
    ),
    Missing(
        "vLLM",
        "`use_beam_search`",
        "/v1/completions",
        {"prompt": "a", "use_beam_search": True},
        "use_beam_search is not supported",
        "Here sequences are forked only after the prompt, not at each step. `best_of` samples instead.",
    ),
    Missing(
        "vLLM",
        "`prompt_embeds`",
        "/v1/completions",
        {"prompt": "a", "prompt_embeds": "AA=="},
        "prompt_embeds is not supported",
        "Clients must not send tensors to the worker. Send text or token ids.",
    ),
    Missing(
        "vLLM",
        "`logits_processors`",
        "/v1/completions",
        {"prompt": "a", "logits_processors": ["x"]},
        "logits_processors is not supported",
        "They are code, which no request may bring. `logit_bias`, `allowed_token_ids` and grammars do much of it.",
    ),
    Missing(
        "vLLM",
        "`chat_template` in a request",
        CHAT,
        {"messages": USER, "chat_template": "x"},
        "--trust-request-chat-template",
        "A template is a program. The operator may allow it. `chat_template_kwargs` is always allowed.",
    ),
    Missing(
        "vLLM",
        "`logprob_token_ids`",
        "/v1/completions",
        {"prompt": "a", "logprob_token_ids": [1]},
        "logprob_token_ids is not supported",
        "The worker returns the likeliest tokens. `echo` with `max_tokens` 0 scores a given text.",
    ),
    Missing(
        "vLLM",
        "`repetition_detection`",
        "/v1/completions",
        {"prompt": "a", "repetition_detection": {"max_pattern_size": 3}},
        "repetition_detection is not supported",
        "An answer ends by `stop`, its end-of-sequence token or its maximum length. `repetition_penalty` may help.",
    ),
    Missing(
        "vLLM",
        "`truncation_side` `right`",
        "/v1/completions",
        {"prompt": "a", "truncation_side": "right"},
        "truncate_prompt_tokens keeps the last",
        "Only the beginning of a prompt is dropped. Cut the text itself, if its end is to go.",
    ),
    Missing(
        "vLLM",
        "`echo` and `documents` in `/v1/chat/completions`",
        CHAT,
        {"messages": USER, "documents": [{"text": "a"}]},
        "documents is not supported",
        "`/v1/completions` has `echo`. Few chat templates use `documents`; `chat_template_kwargs` passes them on to "
        "one that does.",
    ),
    Missing(
        "vLLM",
        "`/v1/chat/completions/batch`, `/inference/v1/generate`, `/invocations`, `/ping`",
        "/invocations",
        {"prompt": "a"},
        "there is no route",
        "For several chats, send [a batch](batches.md), or `prompts` to [`/generate`](native.md). In place of the "
        "others, use `/v1/completions` and `/health`.",
    ),
    Missing(
        "vLLM",
        "`messages` in `/tokenize`, `/tokenizer_info`",
        "/tokenize",
        {"messages": USER},
        "prompt is missing",
        "`/v1/messages/count_tokens` counts the tokens of a chat; `return_token_ids` returns them with its answer.",
    ),
    Missing(
        "vLLM, SGLang",
        "`/pooling`, `/classify`",
        "/pooling",
        {"input": "a"},
        "there is no route",
        _NO_POOLING,
    ),
    Missing(
        "vLLM",
        "`/v1/load_lora_adapter`",
        "/v1/load_lora_adapter",
        {"lora_name": "a", "lora_path": "b"},
        "takes no LoRA adapters",
        "The operator allows it, with `--enable-lora` ([LoRA](lora.md)).",
    ),
    Missing(
        "SGLang",
        "`abort_all`",
        "/abort_request",
        {"rid": "a", "abort_all": True},
        "abort_all is not supported",
        "A client ends its own requests, one by one: send the `rid` of each.",
    ),
    Missing(
        "SGLang",
        "`/update_weights_from_disk`",
        "/update_weights_from_disk",
        {"model_path": "a"},
        "there is no route",
        _BY_THE_OPERATOR,
    ),
    Missing(
        "SGLang",
        "`text`, `sampling_params` and `input_embeds` in `/generate`",
        "/generate",
        {"text": "a", "sampling_params": {"max_new_tokens": 1}},
        "unknown field 'text'",
        "SGLang's format differs: each event repeats the whole text. Send `prompt` and `max_tokens`, or use "
        "`/v1/completions`.",
    ),
    Missing(
        "SGLang",
        "`/flush_cache`, `/get_model_info`",
        "/flush_cache",
        {},
        "there is no route",
        "`/info` describes the model, and `/metrics` its cache. Blocks are dropped as others need their memory.",
    ),
    Missing(
        "TGI",
        "`watermark`",
        "/generate",
        {"inputs": "a", "parameters": {"watermark": True}},
        "watermark",
        "The server marks no answers, because it has nothing that would find the mark.",
    ),
    Missing(
        "TGI",
        "`adapter_id`",
        "/generate",
        {"inputs": "a", "parameters": {"adapter_id": "a"}},
        "no adapters",
        "The server has those that its operator loads ([LoRA](lora.md)).",
    ),
    Missing(
        "Anthropic",
        "images and documents in messages",
        "/v1/messages",
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": IMAGE}]},
        "supports text only",
        _ONLY_TEXT,
    ),
    Missing(
        "Anthropic",
        "`mcp_servers`, `container`, Anthropic's own tools such as `web_search`",
        "/v1/messages",
        {"model": "demo", "max_tokens": 1, "messages": USER, "tools": [{"type": "web_search_20250305", "name": "w"}]},
        "does not support Anthropic's own tools",
        "The server runs no tools. Clients run them, and send what these answered.",
    ),
    Missing(
        "Anthropic",
        "`/v1/messages/batches`, `/v1/complete`",
        "/v1/messages/batches",
        {"requests": []},
        "there is no route",
        "[OpenAI's batches](batches.md) do the same. The older API of texts has been replaced by messages.",
    ),
    Missing(
        "Ollama",
        "`images`",
        "/api/generate",
        {"model": "demo", "prompt": "a", "images": ["AA=="]},
        "supports text only",
        _ONLY_TEXT,
    ),
    Missing(
        "Ollama",
        "`template`",
        "/api/generate",
        {"model": "demo", "prompt": "a", "template": "x"},
        "template is not supported",
        "It is a program in Go's template language. `raw` takes a whole prompt.",
    ),
    Missing(
        "Ollama",
        "`context`",
        "/api/generate",
        {"model": "demo", "prompt": "a", "context": [1]},
        "/api/chat",
        "Send the conversation again: the prefix cache avoids computing it twice. Ollama has deprecated this, too.",
    ),
    Missing(
        "Ollama",
        "`mirostat`",
        "/api/generate",
        {"model": "demo", "prompt": "a", "options": {"mirostat": 1}},
        "mirostat is not supported",
        "`min_p` and `typical_p` serve the same end.",
    ),
    Missing(
        "Ollama",
        "`/api/pull`, `/api/push`, `/api/create`, `/api/copy`, `/api/delete`",
        "/api/pull",
        {"model": "a"},
        "the operator names them",
        _BY_THE_OPERATOR,
    ),
]


def calls_table() -> Iterator[str]:
    """Yield one row for each call."""
    yield "| client | call | outcome |"
    yield "|---|---|---|"
    for each in CALLS:
        yield f"| {each.client} | {each.name} | {each.outcome} |"


def missing_table() -> Iterator[str]:
    """Yield one row for each thing that is refused."""
    yield "| API | what it has | the error says | why, and what to do |"
    yield "|---|---|---|---|"
    for each in MISSING:
        yield f"| {each.peer} | {each.feature} | “{each.refusal}” | {each.reason} |"


def page_with_tables(text: str) -> str:
    """Return the page with new tables."""
    return with_table(with_table(text, "calls", calls_table(), MAKER), "refused", missing_table(), MAKER)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.matrix", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables of docs/clients.md")
    arguments = parser.parse_args()
    broken = []
    with (
        tempfile.TemporaryDirectory() as directory,
        serving("--batch-dir", directory, log=Path(directory) / "log") as server,
        ExitStack() as stack,
    ):
        clients = Clients(server.url, stack)
        for each in (*CALLS, *MISSING):
            try:
                each.check(clients)
            except AssertionError as error:
                broken.append(str(error))
    sys.stdout.write(f"{len(CALLS)} calls and {len(MISSING)} refusals, {len(broken)} broken\n")
    if broken:
        raise SystemExit("\n".join(broken))
    if arguments.write:
        PAGE.write_text(page_with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
