"""Claims about servers that lack something: the message says what, and what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.client.http_client import RequestFailed
from servekit.errors import ConfigError
from servekit.evaluation import model_client
from servekit.evaluation.evaluation import EvaluationSettings
from servekit.evaluation.model_client import ModelClient
from servekit.evaluation.questions import Question
from tests.support.scripted_server import ScriptedServer, scripted_server


def completion(text: str = "", **logprobs: Any) -> bytes:
    return json.dumps({"choices": [{"text": text, "logprobs": logprobs or None}]}).encode()


def client(server: ScriptedServer) -> ModelClient:
    return ModelClient(f"{server.url}/v1/", None, concurrency=2)


async def test_the_logprobs_of_a_prompt_are_those_from_a_token_on_without_the_generated_one() -> None:
    with scripted_server() as server:
        top = [None, {"b": -1.0, "x": -0.5}, {"c": -2.0}, {"d": -3.0}]
        body = completion("abcd", token_logprobs=[None, -1.0, -2.0, -3.0], top_logprobs=top)
        server.scripts["/v1/completions"] = [[body]]
        async with client(server) as asked:
            await asked.find_model()
            scores = await asked.score([5, 6, 7], 1)
    assert [(score.logprob, score.likeliest) for score in scores] == [(-1.0, "x"), (-2.0, "c")]
    assert server.asked[-1][1] == {
        "model": "scripted", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1,
    }  # fmt: skip


@pytest.mark.parametrize("body", [completion("x"), completion("x", token_logprobs=[-1.0])])
async def test_a_server_without_logprobs_of_prompts_is_named(body: bytes) -> None:
    with scripted_server() as server:
        server.scripts["/v1/completions"] = [[body]]
        async with client(server) as asked:
            with pytest.raises(RequestFailed, match="echo with logprobs") as failure:
                await asked.score([5, 6, 7], 1)
    assert failure.value.is_permanent


async def test_a_server_without_tokenize_needs_a_tokenizer_file() -> None:
    with scripted_server() as server:
        server.scripts["/tokenize"] = [[b"{}"]]
        server.statuses["/tokenize"] = (404, {})
        async with client(server) as asked:
            with pytest.raises(RequestFailed, match=r"--tokenizer"):
                await asked.encode("text", special=True)


async def test_a_busy_server_is_asked_again_and_a_refusal_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_client, "_RETRY_AFTER_S", (0.0, 0.0))
    for status, num_asked in ((503, 3), (400, 1)):
        with scripted_server() as server:
            server.scripts["/v1/completions"] = [[b'{"error": {"message": "no", "code": 7}}']]
            server.statuses["/v1/completions"] = (status, {})
            async with client(server) as asked:
                with pytest.raises(RequestFailed, match="no"):
                    await asked.answer(Question(prompt="?"))
            assert len(server.asked) == num_asked


async def test_a_model_is_found_by_its_name_and_one_that_is_not_listed_is_named() -> None:
    listed = {"data": [{"id": "v1", "max_model_len": 10}, {"id": "v2", "max_model_len": 20}]}
    with scripted_server() as server:
        server.scripts["/v1/models"] = [[json.dumps(listed).encode()]]
        async with ModelClient(server.url, None, concurrency=1, model="v2") as named:
            await named.find_model()
            assert (named.model, named.max_model_len) == ("v2", 20)
        async with ModelClient(server.url, None, concurrency=1, model="v3") as named:
            with pytest.raises(RequestFailed, match="lists no model 'v3'; it lists v1, v2"):
                await named.find_model()


async def test_two_models_of_one_server_are_compared() -> None:
    chosen = EvaluationSettings(url="u", served_model_name="v2", against_model_name="v1", questions=["demo"])
    chosen.check()
    assert chosen.compares and not EvaluationSettings(url="u").compares
    with pytest.raises(ConfigError, match="--against-model-name needs"):
        EvaluationSettings(model="demo", against_model_name="v1", questions=["demo"]).check()
    with pytest.raises(ConfigError, match="--served-model-name is for a server"):
        EvaluationSettings(model="demo", served_model_name="v1", questions=["demo"]).check()


async def test_the_first_failure_ends_the_other_requests() -> None:
    async def fail(number: int) -> int:
        if number == 3:
            raise RequestFailed("third")
        return number

    assert await model_client.in_order("numbers", fail, [2, 1]) == [2, 1]
    with pytest.raises(RequestFailed, match="third"):
        await model_client.in_order("numbers", fail, range(5))
