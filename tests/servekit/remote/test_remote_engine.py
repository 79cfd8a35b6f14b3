"""A remote model, as clients of this server see it. A scripted server stands for the remote one."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.applications import Starlette

from servekit.api.app import create_app
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.errors import (
    InvalidRequest,
    QueueFull,
    RemoteFailed,
    RemoteTimeout,
    RemoteUnavailable,
    ServekitError,
    WorkerNotReady,
)
from servekit.models.model_file import parse_model_file
from servekit.models.several_models import SeveralModels
from servekit.remote import token_texts
from servekit.remote.circuit_breaker import State
from servekit.remote.remote_engine import RemoteEngine
from servekit.remote.server_client import ServerClient
from servekit.remote.settings import OpenAISettings
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.sequence import FinishReason
from tests.support.asgi import Answer, ask
from tests.support.pauses import pause
from tests.support.scripted_server import Script, ScriptedServer, event, scripted_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = "sk-of-the-operator"
WORDS = ["The ", "sky ", "is ", "blüe", "."]
USAGE = event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 9, "total_tokens": 20}})
END = b"data: [DONE]\n\n"


def chat_piece(text: str = "", reason: str | None = None, index: int = 0, **delta: Any) -> bytes:
    content = {"content": text} if text else {}
    return event({"choices": [{"index": index, "delta": {**content, **delta}, "finish_reason": reason}]})


def text_piece(text: str = "", reason: str | None = None, index: int = 0) -> bytes:
    return event({"choices": [{"index": index, "text": text, "finish_reason": reason}]})


def chat_answer(words: list[str] = WORDS, reason: str = "stop") -> Script:
    return [chat_piece(role="assistant"), *map(chat_piece, words), chat_piece(reason=reason), USAGE, END]


def text_answer(words: list[str] = WORDS) -> Script:
    return [*map(text_piece, words), text_piece(reason="length"), USAGE, END]


@pytest.fixture
def remote() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        server.scripts[CHAT] = [chat_answer()]
        server.scripts[TEXT] = [text_answer()]
        yield server


def settings_for(server: ScriptedServer, **settings: Any) -> OpenAISettings:
    return OpenAISettings(url=f"{server.url}/v1", **settings)


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    engines: list[RemoteEngine] = []

    async def start_engine(server: ScriptedServer, settings: dict[str, Any] | None = None, **config: Any) -> Any:
        engine = RemoteEngine(
            ServeConfig(model="there", served_model_name="here", **config), settings_for(server, **(settings or {}))
        )
        engines.append(engine)
        await engine.start()
        return engine

    yield start_engine
    for engine in engines:
        await engine.stop()
        assert not engine._live and not engine.sender.num_connections and not engine.sender.num_waiting
        assert not engine.sender.places.total and not engine.sender._slots._held.total()


def wanted(text: str = "What color?", **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompts=[Prompt(text, "prompt")], sampling=Sampling(), max_tokens=20, **fields)


async def submit(engine: RemoteEngine, request: GenerationRequest, caller: Caller | None = None) -> Any:
    caller = caller or Caller()
    places = await engine.take_places(request, caller)
    try:
        return await engine.submit(request, caller, places)
    finally:
        places.release()


async def read(state: Any) -> tuple[str, FinishReason]:
    text, reason = "", None
    while reason is None:
        for delta in await state.queue.get():
            text += delta.text
            reason = delta.finish_reason
    return text, reason


async def answer_of(engine: RemoteEngine, **fields: Any) -> tuple[str, FinishReason]:
    return await read(await submit(engine, wanted(**fields)))


def texts_asked(remote: ScriptedServer) -> list[Any]:
    return [body for path, body in remote.asked if path == TEXT]


def metrics_of(engine: RemoteEngine) -> dict[str, float]:
    """Return the samples of the model's metrics, without its name."""
    found = {}
    for line in generate_latest(engine.metrics.registry).decode().splitlines():
        if line.startswith("servekit_"):
            name, _, value = re.sub(r'model_name="here",?', "", line).rpartition(" ")
            found[name.removeprefix("servekit_").replace(",}", "}").replace("{}", "")] = float(value)
    return found


# -- all wire formats --------------------------------------------------------------------------------------------------


@pytest.fixture
async def app(remote: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Starlette]:
    monkeypatch.setenv("KEY_OF_REMOTE", KEY)
    toml = f"""
    [[model]]
    id = "here"
    kind = "openai"
    model = "there"
    remote = {{ url = "{remote.url}/v1", api_key_env = "KEY_OF_REMOTE", dialect = "vllm" }}
    """
    config = ServeConfig(models="models.toml")
    manager = SeveralModels(config, parse_model_file(toml.encode(), "models.toml", config, "cpu"))
    await manager.start()
    yield create_app(manager)
    await manager.stop()


MESSAGES = [{"role": "user", "content": "What color?"}]


async def post(app: Starlette, path: str, **fields: Any) -> Answer:
    return await ask(app, "POST", path, body=json.dumps({"model": "here", **fields}).encode())


def events_of(answer: Answer) -> list[Any]:
    lines = answer.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


def openai_text(chunks: list[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content", "") for each in chunks if each["choices"])


async def test_same_text_in_every_wire_format_whole_and_streamed(app: Starlette, remote: ScriptedServer) -> None:
    expected, found = "".join(WORDS), {}
    whole = await post(app, "/v1/chat/completions", messages=MESSAGES)
    body = json.loads(whole.body)
    found["openai"] = body["choices"][0]["message"]["content"]
    assert body["model"] == "here" and body["choices"][0]["finish_reason"] == "stop"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (11, 9), "the remote's own count"
    streamed = events_of(
        await post(app, "/v1/chat/completions", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    )
    found["openai, streamed"] = openai_text(streamed)
    assert streamed[-1]["usage"]["completion_tokens"] == 9 and streamed[-1]["usage"]["total_tokens"] == 20
    body = json.loads((await post(app, "/v1/messages", messages=MESSAGES, max_tokens=20)).body)
    found["anthropic"] = body["content"][0]["text"]
    assert body["usage"]["input_tokens"] == 11 and body["usage"]["output_tokens"] == 9
    streamed = events_of(await post(app, "/v1/messages", messages=MESSAGES, max_tokens=20, stream=True))
    found["anthropic, streamed"] = "".join(
        each["delta"]["text"] for each in streamed if each["type"] == "content_block_delta"
    )
    (last,) = [each for each in streamed if each["type"] == "message_delta"]
    assert last["usage"]["output_tokens"] == 9 and last["usage"]["input_tokens"] == 11
    body = json.loads((await post(app, "/v1/responses", input="What color?")).body)
    found["responses"] = body["output"][0]["content"][0]["text"]
    assert body["usage"]["output_tokens"] == 9
    streamed = events_of(await post(app, "/v1/responses", input="What color?", stream=True))
    found["responses, streamed"] = "".join(
        each["delta"] for each in streamed if each["type"] == "response.output_text.delta"
    )
    body = json.loads((await post(app, "/api/chat", messages=MESSAGES, stream=False)).body)
    found["ollama"] = body["message"]["content"]
    assert body["eval_count"] == 9 and body["prompt_eval_count"] == 11
    lines = (await post(app, "/api/chat", messages=MESSAGES)).body.decode().splitlines()
    found["ollama, streamed"] = "".join(json.loads(line)["message"]["content"] for line in lines)
    body = json.loads((await post(app, "/api/generate", prompt="What color?", stream=False)).body)
    found["ollama, a prompt"] = body["response"]
    asked = [body for path, body in remote.asked if path == CHAT]
    assert {each["model"] for each in asked} == {"there"}
    assert all(each["messages"] == MESSAGES for each in asked)

    body = json.loads((await post(app, "/v1/completions", prompt="What color?")).body)
    found["completions"] = body["choices"][0]["text"]
    assert body["usage"]["completion_tokens"] == 9
    streamed = events_of(await post(app, "/v1/completions", prompt="What color?", stream=True))
    found["completions, streamed"] = "".join(each["choices"][0]["text"] for each in streamed)
    body = json.loads((await post(app, "/generate", prompt="What color?", max_tokens=20)).body)
    found["native"] = body["generated_text"]
    assert body["usage"]["completion_tokens"] == 9 and body["finish_reason"] == "length"
    streamed = events_of(await post(app, "/generate_stream", prompt="What color?", max_tokens=20))
    found["native, streamed"] = "".join(each["token"]["text"] for each in streamed if each["token"])
    assert streamed[-1]["generated_text"] == expected
    body = json.loads((await post(app, "/generate", inputs="What color?", parameters={"max_new_tokens": 20})).body)
    found["tgi"] = body["generated_text"]
    streamed = events_of(await post(app, "/generate_stream", inputs="What color?", parameters={"max_new_tokens": 20}))
    found["tgi, streamed"] = "".join(each["token"]["text"] for each in streamed)
    assert found == dict.fromkeys(found, expected)
    assert all(body["prompt"] == "What color?" for path, body in remote.asked if path == TEXT)


async def test_reasoning_and_tool_calls_pass_through(app: Starlette, remote: ScriptedServer) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    remote.scripts[CHAT] = [
        [
            chat_piece(reasoning_content="Hm. "),
            chat_piece("I look."),
            chat_piece(tool_calls=[call]),
            chat_piece(tool_calls=[{"index": 0, "function": {"arguments": '{"city": '}}]),
            chat_piece(tool_calls=[{"index": 0, "function": {"arguments": '"Rome"}'}}]),
            chat_piece(reason="tool_calls"),
            USAGE,
            END,
        ]
    ]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    earlier = {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "c0", "content": "rain"},
    ]
    body = json.loads((await post(app, CHAT, messages=messages, tools=tools, tool_choice="required")).body)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "Hm. "
    assert choice["message"]["content"] == "I look."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    _, sent = remote.asked[-1]
    assert sent["messages"] == messages and sent["tools"] == tools and sent["tool_choice"] == "required"
    anthropic_tools = [{"name": "weather", "input_schema": parameters}]
    body = json.loads((await post(app, "/v1/messages", messages=MESSAGES, max_tokens=9, tools=anthropic_tools)).body)
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["content"][2]["input"] == {"city": "Rome"} and body["stop_reason"] == "tool_use"


async def test_key_goes_to_the_server_and_to_nobody_else(app: Starlette, remote: ScriptedServer) -> None:
    remote.statuses[CHAT] = (401, {})
    remote.scripts[CHAT] = [[json.dumps({"error": {"message": f"Incorrect API key: {KEY}"}}).encode()]]
    answer = await post(app, CHAT, messages=MESSAGES)
    assert answer.status == 502 and answer.error["code"] == "remote_failed"
    for path in ("/info", "/v1/models", "/metrics"):
        answer_ = await ask(app, "GET", path)
        assert answer_.status == 200 and KEY.encode() not in answer_.body
    assert KEY.encode() not in answer.body


async def test_what_a_remote_model_cannot_do_is_refused_in_a_sentence(app: Starlette, remote: ScriptedServer) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": [1, 2, 3]}),
        (TEXT, {"prompt": "x", "prompt_logprobs": 1}),
        (TEXT, {"prompt": "x", "suffix": "y"}),
        (TEXT, {"prompt": "x", "n": 1, "best_of": 2}),
        (TEXT, {"prompt": "x", "truncate_prompt_tokens": 2}),
        (TEXT, {"prompt": ""}),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ x }}"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/api/show", {"model": "here"}),
    ]
    for path, fields in refused:
        answer = await post(app, path, **fields)
        assert answer.status == 400, (path, fields, answer.body)
        assert b"another server" in answer.body or fields.get("prompt") == "", (path, answer.body)
    assert not [path for path, _ in remote.asked if path != "/v1/models"]


async def test_logprobs_are_those_of_the_server(app: Starlette, remote: ScriptedServer) -> None:
    """Its tokens come with their texts, and without ids."""
    top = [{"token": "sky", "logprob": -0.25, "bytes": [115, 107, 121]}, {"token": "sea", "logprob": -2.0}]
    token = {"token": "sky", "logprob": -0.25, "bytes": None, "top_logprobs": top}
    choice = {"delta": {"content": "sky"}, "logprobs": {"content": [token]}}
    remote.scripts[CHAT] = [[event({"choices": [choice]}), chat_piece(reason="stop"), USAGE, END]]
    body = json.loads((await post(app, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2)).body)
    (found,) = body["choices"][0]["logprobs"]["content"]
    assert (found["token"], found["logprob"], found["bytes"]) == ("sky", -0.25, [115, 107, 121])
    assert [(each["token"], each["logprob"]) for each in found["top_logprobs"]] == [("sky", -0.25), ("sea", -2.0)]
    (_, asked) = remote.asked[-1]
    assert asked["logprobs"] is True and asked["top_logprobs"] == 2

    of_two = {
        "tokens": ["The", " sky"],
        "token_logprobs": [-1.0, -0.5],
        "top_logprobs": [{"The": -1.0}, {" sky": -0.5}],
    }
    choice = {"text": "The sky", "logprobs": of_two}
    remote.scripts[TEXT] = [[event({"choices": [choice]}), text_piece(reason="length"), USAGE, END]] * 3
    fields = {"prompt": "x", "max_tokens": 20, "logprobs": 1}
    body = json.loads((await post(app, TEXT, **fields)).body)
    assert body["choices"][0]["text"] == "The sky"
    found = body["choices"][0]["logprobs"]
    assert (found["tokens"], found["token_logprobs"]) == (["The", " sky"], [-1.0, -0.5])
    assert (found["top_logprobs"], found["text_offset"]) == ([{"The": -1.0}, {" sky": -0.5}], [0, 3])
    streamed = events_of(await post(app, TEXT, **fields, stream=True))
    named = [name for each in streamed for name in (each["choices"][0].get("logprobs") or {}).get("tokens", [])]
    assert named == ["The", " sky"] and "".join(each["choices"][0]["text"] for each in streamed) == "The sky"
    native = json.loads((await post(app, "/generate", prompt="x", max_tokens=20, logprobs=1)).body)
    assert [(each["text"], each["logprob"]) for each in native["tokens"]] == [("The", -1.0), (" sky", -0.5)]
    assert all(each["id"] < 0 for each in native["tokens"]), "they are no ids of the model"


def test_tokens_of_a_server_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_texts, "MAX_TOKENS", 3)
    texts = token_texts.TokenTexts("here")
    assert [texts.id_of(each) for each in (b"a", b"b", b"a")] == [-2, -3, -2]
    assert texts.decode([-2, -3, -1]) == "ab"
    with pytest.raises(RemoteFailed, match="a token of 2000 bytes"):
        texts.id_of(b"x" * 2000)
    for number in (-4, 0, 5):
        with pytest.raises(InvalidRequest):
            texts.decode([number])


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "result", "num_tries"),
    [
        (400, {}, '{"error": {"message": "temperature is wrong"}}', InvalidRequest, "refused", 1),
        (422, {}, '{"error": "inputs is wrong"}', InvalidRequest, "refused", 1),
        (401, {}, "{}", RemoteFailed, "refused", 1),
        (404, {}, '{"object": "error", "message": "no such model"}', RemoteFailed, "refused", 1),
        (307, {"Location": "/elsewhere"}, "", RemoteFailed, "refused", 1),
        (429, {"Retry-After": "30"}, "{}", RemoteUnavailable, "busy", 1),
        (429, {}, "{}", RemoteUnavailable, "busy", 3),
        (503, {"Retry-After": "7"}, "{}", RemoteUnavailable, "busy", 1),
        (500, {}, "oh no", RemoteFailed, "failed", 3),
        (504, {}, "", RemoteTimeout, "failed", 3),
    ],
)
async def test_refusals_of_the_remote_become_our_errors(
    remote: ScriptedServer,
    start: Start,
    status: int,
    headers: dict[str, str],
    body: str,
    kind: type[ServekitError],
    result: str,
    num_tries: int,
) -> None:
    remote.statuses[TEXT] = (status, headers)
    remote.scripts[TEXT] = [[body.encode() or b" "]]
    remote.scripts["/elsewhere"] = [text_answer()]
    engine = await start(remote)
    with pytest.raises(ServekitError) as caught:
        await submit(engine, wanted())
    assert type(caught.value) is kind
    if "Retry-After" in headers:
        assert caught.value.retry_after_s == int(headers["Retry-After"])
    if "is wrong" in body:
        assert "is wrong" in caught.value.message, "the remote's own words"
    metrics = metrics_of(engine)
    assert metrics[f'remote_requests_total{{result="{result}"}}'] == num_tries
    assert metrics["remote_retries_total"] == num_tries - 1
    assert len([path for path, _ in remote.asked if path == TEXT]) == num_tries
    assert "/elsewhere" not in [path for path, _ in remote.asked], "redirects are not followed"


async def test_refusal_within_a_stream_is_told_and_does_not_count_against_the_server(
    remote: ScriptedServer, start: Start
) -> None:
    """vLLM checks some fields, such as the ids of logit_bias, after it has begun to answer."""
    remote.scripts[TEXT] = [[event({"error": {"message": "out of the vocabulary", "code": 400}}), END]]
    engine = await start(remote, {"failures_to_open": 1})
    for number in range(1, 3):
        with pytest.raises(InvalidRequest, match="refused the request: out of the vocabulary"):
            await answer_of(engine)
        assert metrics_of(engine)['remote_requests_total{result="refused"}'] == number == len(texts_asked(remote))
    assert engine.state == "ready"


async def test_request_is_repeated_until_the_remote_works_again(remote: ScriptedServer, start: Start) -> None:
    truncated: Script = [b": queued\n\n"]  # the connection closes before anything of the answer has come
    remote.scripts[TEXT] = [truncated, truncated, text_answer()]
    engine = await start(remote)
    assert await answer_of(engine) == ("".join(WORDS), FinishReason.LENGTH)
    assert metrics_of(engine)["remote_retries_total"] == 2


async def test_answer_that_has_begun_is_not_repeated(remote: ScriptedServer, start: Start) -> None:
    remote.scripts[TEXT] = [[text_piece("The "), text_piece("sky ")], text_answer()]
    engine = await start(remote)
    state = await submit(engine, wanted())
    with pytest.raises(RemoteFailed, match="before the answer was complete"):
        await read(state)
    assert len([path for path, _ in remote.asked if path == TEXT]) == 1
    assert state.finish_reasons == [FinishReason.ERROR]


@pytest.mark.parametrize(
    "garbage",
    [
        b"data: {not json}\n\n",
        event({"choices": [{"index": 5, "text": "x"}]}),
        event({"error": {"message": "CUDA out of memory", "code": 500}}),
        b"data: " + b"x" * (2**20 + 10),
        event({"choices": [], "usage": {"prompt_tokens": -1}}),
    ],
)
async def test_nonsense_of_the_remote_is_its_failure(remote: ScriptedServer, start: Start, garbage: bytes) -> None:
    remote.scripts[TEXT] = [[text_piece("The "), garbage]]
    engine = await start(remote)
    with pytest.raises(RemoteFailed):
        await answer_of(engine)


async def test_remote_that_is_not_there_is_unavailable_and_the_breaker_opens(start: Start) -> None:
    with scripted_server() as server:
        pass  # its port is closed now
    engine = await start(server, {"failures_to_open": 3, "max_retries": 1, "cooldown": 30.0})
    for _ in range(2):
        with pytest.raises(RemoteUnavailable, match="cannot be reached"):
            await answer_of(engine)
    assert engine.sender.breaker.state is State.OPEN and engine.state == "recovering"
    started_s = time.monotonic()
    with pytest.raises(RemoteUnavailable, match="no request is sent to it for about") as caught:
        await answer_of(engine)
    assert caught.value.retry_after_s is not None and 25 <= caught.value.retry_after_s <= 30
    assert time.monotonic() - started_s < 0.1
    metrics = metrics_of(engine)
    assert metrics['remote_breaker_state{state="open"}'] == 1.0
    assert metrics["remote_breaker_opened_total"] == 1.0
    assert metrics["remote_breaker_rejections_total"] == 1.0
    assert not await engine.probe_readiness()


async def test_one_tenants_requests_at_which_the_server_fails_do_not_stop_those_of_others(
    remote: ScriptedServer, start: Start
) -> None:
    """Before, a tenant opened the breaker for all tenants, by prompts that the server cannot take."""
    remote.scripts[TEXT] = [[b": "], [b": "], text_answer()]
    engine = await start(remote, {"failures_to_open": 2, "max_retries": 0, "cooldown": 30.0})
    for _ in range(2):
        with pytest.raises(RemoteFailed):
            await read(await submit(engine, wanted(), Caller("a")))
    with pytest.raises(RemoteUnavailable, match="no request of yours is sent to it"):
        await read(await submit(engine, wanted(), Caller("a")))
    assert engine.state == "recovering", "as far as the failures show"
    assert (await read(await submit(engine, wanted(), Caller("b"))))[0] == "".join(WORDS)
    assert engine.state == "ready"


async def test_a_request_that_waited_is_not_sent_if_the_breaker_of_its_tenant_opened_meanwhile(
    remote: ScriptedServer, start: Start
) -> None:
    fail = threading.Event()
    remote.scripts[TEXT] = [[fail, b": "], text_answer()]
    engine = await start(remote, {"max_connections": 1, "failures_to_open": 1, "max_retries": 0, "cooldown": 30.0})

    async def answer_for(tenant: str) -> tuple[str, FinishReason]:
        return await read(await submit(engine, wanted(), Caller(tenant)))

    async with asyncio.timeout(60):
        first = asyncio.create_task(answer_for("a"))
        await asyncio.to_thread(remote.wait_for, 2)
        waiting = [asyncio.create_task(answer_for(tenant)) for tenant in ("a", "b")]
        await asyncio.sleep(0.05)
        fail.set()
        ends = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [type(end) for end in ends[:2]] == [RemoteFailed, RemoteUnavailable] and isinstance(ends[2], tuple)
    assert len(texts_asked(remote)) == 2


async def test_a_tenant_with_slow_answers_leaves_a_connection_to_others(remote: ScriptedServer, start: Start) -> None:
    """Before, one tenant could hold all connections. Others waited until one of its answers ended, or were refused."""
    rest = threading.Event()
    remote.scripts[TEXT] = [[text_piece("It "), rest, *text_answer()]] * 2 + [text_answer()]
    engine = await start(remote, {"max_connections": 3})

    async def answer_for(tenant: str) -> tuple[str, FinishReason]:
        return await read(await submit(engine, wanted(), Caller(tenant)))

    slow = [asyncio.create_task(answer_for("slow")) for _ in range(4)]
    async with asyncio.timeout(60):
        await asyncio.to_thread(remote.wait_for, 3)  # with the one for its models
        assert (await answer_for("other"))[0] == "".join(WORDS)
        assert [task.exception() for task in slow if task.done()] == []
        rest.set()
        await asyncio.gather(*slow)


async def test_breaker_lets_a_probe_through_and_closes(remote: ScriptedServer, start: Start) -> None:
    remote.scripts[TEXT] = [[b": "], text_answer()]
    engine = await start(remote, {"failures_to_open": 1, "max_retries": 0, "cooldown": 0.05})
    with pytest.raises(RemoteFailed):
        await answer_of(engine)
    assert engine.sender.breaker.state is State.OPEN
    await asyncio.sleep(0.06)
    assert (await answer_of(engine))[0] == "".join(WORDS)
    assert engine.sender.breaker.state is State.CLOSED and await engine.probe_readiness()


async def test_probe_is_over_as_soon_as_its_answer_begins(remote: ScriptedServer, start: Start) -> None:
    rest = threading.Event()
    remote.scripts[TEXT] = [[b": "], [text_piece("It "), rest, *text_answer()], text_answer()]
    engine = await start(remote, {"failures_to_open": 1, "max_retries": 0, "cooldown": 0.05})
    with pytest.raises(RemoteFailed):
        await answer_of(engine)
    await asyncio.sleep(0.06)
    probe = await submit(engine, wanted())
    await probe.queue.get()
    assert engine.sender.breaker.state is State.CLOSED
    assert (await answer_of(engine))[0] == "".join(WORDS), "a long answer to the probe keeps no other request waiting"
    rest.set()
    await read(probe)


async def test_retry_budget_bounds_the_load_on_a_remote_that_fails(remote: ScriptedServer, start: Start) -> None:
    remote.statuses[TEXT] = (500, {})
    remote.scripts[TEXT] = [[b"{}"]]
    engine = await start(remote, {"failures_to_open": 1000, "max_retries": 5, "retry_ratio": 0.1})
    outcomes = await asyncio.gather(*(answer_of(engine) for _ in range(30)), return_exceptions=True)
    assert all(isinstance(each, RemoteFailed | RemoteUnavailable) for each in outcomes)
    metrics = metrics_of(engine)
    num_sent = sum(value for name, value in metrics.items() if name.startswith("remote_requests_total"))
    assert 40 <= num_sent <= 30 + 10 + 3, "each request once, and what the budget had"
    assert metrics["remote_retry_budget_exhausted_total"] > 0


async def test_silence_is_a_timeout_before_the_answer_and_within_it(remote: ScriptedServer, start: Start) -> None:
    never = threading.Event()
    engine = await start(remote, {"first_token_timeout": 0.3, "token_timeout": 0.2})
    remote.scripts[TEXT] = [[never]]
    with pytest.raises(RemoteTimeout, match="first_token_timeout"):
        await answer_of(engine)
    remote.scripts[TEXT] = [[text_piece("The "), never]]
    state = await submit(engine, wanted())
    with pytest.raises(RemoteTimeout, match="token_timeout"):
        await read(state)
    await asyncio.to_thread(remote.wait_for, 3, 2)
    remote.scripts[TEXT] = [[text_piece(""), never]]  # a first event without text, as OpenAI sends it
    state = await submit(engine, wanted())
    with pytest.raises(RemoteTimeout, match=r"within 0\.3 s \(first_token_timeout\)"):
        await read(state)
    assert metrics_of(engine)['remote_requests_total{result="timeout"}'] == 3


async def freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the whole container had been stopped for an hour: timers that are due by the clock run."""
    await asyncio.sleep(0.01)
    pause(monkeypatch, 3600.0)
    await asyncio.sleep(0.1)


async def test_a_pause_of_the_container_is_not_silence_of_the_server(
    remote: ScriptedServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the answer, within it, and while a request waits for a connection."""
    first, second = threading.Event(), threading.Event()
    engine = await start(remote, {"max_connections": 1})
    remote.scripts[TEXT] = [[first, text_piece("The "), second, *map(text_piece, WORDS[1:]), *text_answer([])]]
    running = asyncio.create_task(submit(engine, wanted()))
    waiting = asyncio.create_task(submit(engine, wanted()))
    await asyncio.to_thread(remote.wait_for, 2)
    await freeze(monkeypatch)
    first.set()
    state = await running
    (begun,) = await state.queue.get()
    await freeze(monkeypatch)
    second.set()
    text, _ = await read(state)
    assert begun.text + text == "".join(WORDS)
    assert (await read(await waiting))[0] == "".join(WORDS)
    assert engine.sender.breaker.state is State.CLOSED


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_client_that_leaves_ends_the_request_at_the_remote(remote: ScriptedServer, start: Start) -> None:
    never = threading.Event()
    remote.scripts[TEXT] = [[text_piece("The "), never]]
    engine = await start(remote)
    state = await submit(engine, wanted())
    await state.queue.get()
    state.abort()
    await asyncio.to_thread(remote.wait_for, 2, 1)
    assert state.finish_reasons == [FinishReason.ABORT]
    remote.scripts[TEXT] = [[never]]
    waiting = asyncio.create_task(submit(engine, wanted()))  # the remote has not begun to answer
    await asyncio.to_thread(remote.wait_for, 3, 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.to_thread(remote.wait_for, 3, 2)
    metrics = metrics_of(engine)
    assert metrics['remote_requests_total{result="aborted"}'] == 2 and engine.sender.breaker.state is State.CLOSED
    assert metrics['request_success_total{finished_reason="abort"}'] == 2


async def test_request_is_aborted_by_its_id(remote: ScriptedServer, start: Start) -> None:
    remote.scripts[TEXT] = [[text_piece("The "), threading.Event()]]
    engine = await start(remote)
    state = await submit(engine, wanted(), Caller("search", "r1"))
    (first,) = await state.queue.get()
    assert await engine.abort_request("law", "r1") == 0
    assert await engine.abort_request("search", "r1") == 1
    assert first.text == "The " and await read(state) == ("", FinishReason.ABORT)
    await asyncio.to_thread(remote.wait_for, 2, 1)


async def test_deadlines_end_answers_as_far_as_they_are(remote: ScriptedServer, start: Start) -> None:
    never = threading.Event()
    remote.scripts[TEXT] = [[text_piece("The "), never], [b": keep-alive\n\n", never], [never]]
    engine = await start(remote)
    assert await answer_of(engine, deadline_ms=300) == ("The ", FinishReason.DEADLINE)
    assert await answer_of(engine, ttft_ms=300) == ("", FinishReason.DEADLINE)
    with pytest.raises(ServekitError) as caught:
        await answer_of(engine, deadline_ms=200)
    assert caught.value.answer_code == "deadline_exceeded"
    await asyncio.to_thread(remote.wait_for, 4, 3)


async def test_stop_fails_what_runs(remote: ScriptedServer, start: Start) -> None:
    remote.scripts[TEXT] = [[text_piece("The "), threading.Event()]]
    engine = await start(remote)
    state = await submit(engine, wanted())
    engine.drain()
    with pytest.raises(WorkerNotReady, match="shutting down"):
        await answer_of(engine)
    await engine.stop()
    await engine.wait_until_failed()
    with pytest.raises(WorkerNotReady, match="shutting down"):
        await read(state)
    await asyncio.to_thread(remote.wait_for, 2, 1)


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_connections_and_the_queue_are_bounded_and_tenants_take_turns(
    remote: ScriptedServer, start: Start
) -> None:
    go = threading.Event()
    remote.scripts[TEXT] = [[text_piece("a"), go, *text_answer()]]
    engine = await start(remote, {"max_connections": 3}, max_num_queued_reqs=16)
    assert engine.has_spare_connections, "all are free"
    third = await submit(engine, wanted("third"), Caller("third"))  # on the connection that `big` leaves to others
    big = [asyncio.create_task(submit(engine, wanted(f"big {i}"), Caller("big"))) for i in range(8)]
    await asyncio.to_thread(remote.wait_for, 4)
    small = asyncio.create_task(submit(engine, wanted("small"), Caller("small")))
    await asyncio.sleep(0.05)
    assert (engine.sender.stats().num_connections, engine.sender.stats().num_waiting) == (3, 7)
    assert not engine.has_spare_connections
    big.append(asyncio.create_task(submit(engine, wanted("big 8"), Caller("big"))))
    await asyncio.sleep(0.05)
    with pytest.raises(QueueFull, match="max_num_queued_reqs"):  # 7 wait, and a tenant leaves as much as it takes
        await submit(engine, wanted("one too many"), Caller("big"))
    go.set()
    await asyncio.gather(*big, small, return_exceptions=True)
    for state in [third, *(task.result() for task in (*big, small) if task.exception() is None)]:
        await read(state)
    prompts = [body["prompt"] for path, body in remote.asked if path == TEXT]
    assert prompts.index("small") <= 5, "the other tenant's turn comes before the queue of the first one"


async def test_several_prompts_and_answers_are_in_order(app: Starlette, remote: ScriptedServer) -> None:
    two = [text_piece("a0", index=0), text_piece("a1", index=1), text_piece(reason="stop", index=1)]
    remote.scripts[TEXT] = [[*two, text_piece(reason="stop", index=0), USAGE, END]]
    body = json.loads((await post(app, TEXT, prompt=["x", "y"], n=2)).body)
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "a0", "a1"]
    assert body["usage"]["prompt_tokens"] == 22 and body["usage"]["completion_tokens"] == 18
    assert sorted(each["prompt"] for path, each in remote.asked if path == TEXT) == ["x", "y"]


async def test_proxy_is_that_of_the_model_file_and_not_of_the_environment(
    remote: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    far = "http://model.invalid/v1"  # only the proxy would look it up
    remote.scripts[f"{far}/models"] = remote.scripts["/v1/models"]
    for url, proxy in ((far, remote.url), (f"{remote.url}/v1", None)):
        client = ServerClient("m", OpenAISettings(url=url, proxy=proxy))
        await client.start()
        await client.look_up("scripted", 5.0)
        await client.close()
    assert [path for path, _ in remote.asked] == [f"{far}/models", "/v1/models"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (200, None),
        (404, None),
        (401, r"answered 401 .* \(is its API key right\? api_key_env\): Incorrect API key"),
        (500, "answered 500 when it was asked for its models: Incorrect API key"),
    ],
)
async def test_server_that_refuses_to_list_its_models_is_warned_of_at_the_start(
    remote: ScriptedServer, caplog: pytest.LogCaptureFixture, status: int, message: str | None
) -> None:
    if status != 200:
        remote.scripts["/v1/models"] = [[json.dumps({"error": {"message": "Incorrect API key"}}).encode()]]
        remote.statuses["/v1/models"] = (status, {})
    client = ServerClient("m", OpenAISettings(url=f"{remote.url}/v1"))
    await client.start()
    assert await client.look_up("scripted", 5.0) is None
    await client.close()
    assert [bool(re.search(message or "", each)) for each in caplog.messages] == [True] * (message is not None)
