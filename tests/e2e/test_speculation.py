"""Speculative decoding over HTTP: the answers are those without it, and the accounts are right."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support.draft_heads import MTP_MODELS, add_mtp_layer, make_eagle3_head
from tests.support.server_process import ONE_THREAD, ServerProcess, events, serving
from tests.support.tiny_models import _LLAMA_LIKE, make_model

# The model repeats, counts and tells stories: some of that repeats itself, some does not.
PROMPTS = [
    'Repeat after me: "boat mirror anya blue grace knows a yellow flag boat mirror anya blue."',
    "Count from 1 to 20.",
    "Tell me a short story about a cat.",
    "What color is the sky?",
]
GREEDY = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 7, "max_tokens": 64, "ignore_eos": True}


def simulated_answer(prompt: str, num_tokens: int) -> str:
    return bytes(NaiveReference().output(prompt.encode(), SamplingParams(max_tokens=num_tokens))).decode()


# -- the simulated drafter: the whole control plane --------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("simulated") / "log"
    flags = ("--speculative", "ngram:4", "--num-kv-blocks", "60", "--log-format", "json")
    with serving("--model", "sim:step=1ms,acceptance=0.8", *flags, log=log) as server:
        yield server


def test_usage_info_metrics_and_log_say_what_was_drafted(simulated: ServerProcess) -> None:
    prompt = "Who drafts?"
    answer = simulated.generate(prompt, max_tokens=200)
    usage = answer["usage"]
    assert answer["generated_text"] == simulated_answer(prompt, 200) and usage["completion_tokens"] == 200
    assert 0 < usage["accepted_tokens"] < usage["drafted_tokens"]
    *_, last = simulated.stream(prompt, max_tokens=200)
    assert last["generated_text"] == answer["generated_text"] and last["usage"]["accepted_tokens"] > 0
    body = {"prompt": prompt, "max_tokens": 200}
    details = simulated.client.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0 and details["rejected_prediction_tokens"] > 0
    none = simulated.generate(prompt, max_tokens=200, max_drafts=0)
    assert none["generated_text"] == answer["generated_text"] and "drafted_tokens" not in none["usage"]
    info = simulated.client.get("/info").json()
    assert info["max_drafts"] == 4 and info["replicas"][0]["drafter"] == "ngram"
    drafted, accepted = (
        simulated.metric(f"servekit_spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
    assert accepted == simulated.metric("servekit_spec_decode_num_accepted_tokens_per_pos_total")
    simulated.wait_for_log(f'"accepted_tokens": {usage["accepted_tokens"]}')


def test_a_stop_string_within_a_span_leaves_no_token_in_any_account(simulated: ServerProcess) -> None:
    """The manager does not know stop strings: it commits the rest of a span behind one."""
    prompt = "Who counts?"
    text = simulated_answer(prompt, 400)
    before = {
        name: simulated.metric(f"servekit_{name}")
        for name in ("generation_tokens_total", "request_generation_tokens_sum")
    }
    num_tokens = 0
    for end in range(60, 280, 17):  # somewhere in a span
        stop = text[end : end + 6]
        expected = text.index(stop) + len(stop)
        usage = simulated.generate(prompt, max_tokens=400, stop=stop)["usage"]
        assert usage["completion_tokens"] == expected
        num_tokens += expected
    for name, known in before.items():
        simulated.wait_for_metric(f"servekit_{name}", known + num_tokens)


def test_small_kv_cache_and_many_sequences_give_the_same_answers(simulated: ServerProcess) -> None:
    """960 tokens for 1,900: most sequences wait, or are preempted and computed again."""
    prompts = [f"Which of them is the next one? {number}" for number in range(20)]
    answers = simulated.client.post("/generate", json={"prompts": prompts, "max_tokens": 64}).json()
    assert answers["generated_texts"] == [simulated_answer(prompt, 64) for prompt in prompts]
    simulated.wait_until_at_rest()


def test_a_prediction_is_accepted_in_all_its_forms(simulated: ServerProcess) -> None:
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    expected = simulated_answer("user: hi\nassistant: ", 9)
    for content in ("some text", [{"type": "text", "text": "some "}, {"type": "text", "text": "text"}], "x" * 100_000):
        body = {**message, "prediction": {"type": "content", "content": content}}
        answer = simulated.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == expected
    body = {**message, "prediction": {"type": "image", "content": ""}}
    assert simulated.client.post("/v1/chat/completions", json=body).status_code == 400


# -- the demo model, with each of its drafters -----------------------------------------------------------------------


def ask_all(server: ServerProcess, **fields: Any) -> list[Any]:
    """Answers to all prompts at the same time, streamed and whole, and two for each."""

    def whole(prompt: str) -> str:
        text: str = server.generate(prompt, **fields)["generated_text"]
        return text

    def streamed(prompt: str) -> str:
        return "".join(event["token"]["text"] for event in server.stream(prompt, **fields) if event["token"])

    def forked(prompt: str) -> list[str]:
        body = {"prompt": prompt, "n": 2, **fields}
        choices = server.client.post("/v1/completions", json=body).json()["choices"]
        return [choice["text"] for choice in choices]

    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(how, prompt) for prompt in PROMPTS for how in (whole, streamed, forked)]
        return [each.result() for each in asked]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The answers without drafts, greedy and seeded."""
    with serving(log=tmp_path_factory.mktemp("off") / "log", environment=ONE_THREAD) as plain:
        return [ask_all(plain, **fields) for fields in (GREEDY, SEEDED)]


# Their drafters begin anew in another worker, too, which ngram+draft shows for both: a new worker takes five seconds.
NOT_KILLED_ALONE = ("ngram", "draft")


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "flags"),
    [
        ("ngram", ()),
        ("draft", ()),
        ("medusa", ()),
        ("self", ()),
        ("ngram+draft", ()),
        ("draft", ("--tensor-parallel-size", "2")),
        ("draft", ("--data-parallel-size", "2")),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part) or "alone",
)
def test_answers_are_those_without_drafts_even_when_a_worker_is_killed(
    drafter: str, flags: tuple[str, ...], expected: list[list[Any]], tmp_path: Path
) -> None:
    with serving("--speculative", drafter, *flags, log=tmp_path / "log", environment=ONE_THREAD) as server:
        assert [ask_all(server, **fields) for fields in (GREEDY, SEEDED)] == expected
        ask_until_drafts_are_accepted(server, expected[0])
        assert server.client.get("/info").json()["replicas"][0]["drafter"] == drafter
        none = server.generate(PROMPTS[0], **GREEDY, max_drafts=0)
        assert none["generated_text"] == expected[0][0] and "drafted_tokens" not in none["usage"]
        if flags or drafter not in NOT_KILLED_ALONE:
            check_with_killed_worker(server, expected[0][0])


def ask_until_drafts_are_accepted(server: ServerProcess, expected: list[Any]) -> None:
    """Where drafts do not pay, they are only tried now and then. On a busy machine that may be so for many requests."""
    until = time.monotonic() + 60.0
    while not server.metric("servekit_spec_decode_num_accepted_tokens_total"):
        assert time.monotonic() < until, "no draft was accepted in a minute"
        for index, prompt in enumerate(PROMPTS):
            assert server.generate(prompt, **GREEDY)["generated_text"] == expected[3 * index]


def check_with_killed_worker(server: ServerProcess, expected: str) -> None:
    """Kill a worker while the first prompt is answered, and compare the answer."""
    with server.client.stream("POST", "/generate_stream", json={"prompt": PROMPTS[0], **GREEDY}) as response:
        lines = events(response.iter_lines())
        pieces = [next(lines)["token"]["text"]]
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        pieces += [event["token"]["text"] for event in lines if event["token"]]
    assert "".join(pieces) == expected
    server.wait_for_metric("servekit_worker_restarts_total", 1)
    server.wait_until_at_rest()


@pytest.mark.long
def test_heads_give_the_answers_without_drafts_even_when_a_worker_is_killed(tmp_path: Path) -> None:
    """A small mixture of experts with a MTP layer, an EAGLE-3 head for it, and the demo model's tokenizer."""
    model, head = tmp_path / "model", tmp_path / "head"
    sizes = {**_LLAMA_LIKE, **MTP_MODELS["glm4_moe"], "vocab_size": 2048, "max_position_embeddings": 512}
    make_eagle3_head(head, make_model(model, "glm4_moe", sizes).config)
    add_mtp_layer(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_PATH / name, model / name)
    flags = ("--model", str(model))
    with serving(*flags, log=tmp_path / "log-off", environment=ONE_THREAD) as plain:
        expected = [ask_all(plain, **fields) for fields in (GREEDY, SEEDED)]
    for drafter in (f"eagle:{head}", "mtp"):
        name = drafter.partition(":")[0]
        log = tmp_path / f"log-{name}"
        with serving(*flags, "--speculative", drafter, log=log, environment=ONE_THREAD) as server:
            assert [ask_all(server, **fields) for fields in (GREEDY, SEEDED)] == expected
            assert server.client.get("/info").json()["replicas"][0]["drafter"] == name
            assert server.metric("servekit_spec_decode_num_draft_tokens_total") > 0
            check_with_killed_worker(server, expected[0][0])
            assert ask_all(server, **SEEDED) == expected[1], "the new worker's head, too"
