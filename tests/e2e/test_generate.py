"""Answers of a real server with the demo model."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.server_process import ServerProcess
from tests.support.timing import again_if_late, assert_within

QUESTIONS = {
    "What color is the sky?": "blue",
    "How many legs does a cat have?": "four",
    "What is the capital of Japan?": "Tokyo",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_demo_model_answers_sensibly(server: ServerProcess, question: str) -> None:
    chat = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH).apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    for prompt in (question, chat):
        answer = server.generate(prompt)
        assert QUESTIONS[question].lower() in answer["generated_text"].lower()
        assert answer["finish_reason"] == "stop"


def test_list_of_prompts_is_answered_in_order_and_in_one_batch(server: ServerProcess) -> None:
    prompts = [f"{'the cat sat on the mat ' * (i * 7 % 11)}What is {i} plus 1?" for i in range(64)]
    alone = [server.generate(prompt, max_tokens=12)["generated_text"] for prompt in prompts[:8]]
    before = server.metric("servekit_scheduler_steps_total")
    response = server.client.post("/generate", json={"prompts": prompts, "max_tokens": 12})
    num_steps = server.metric("servekit_scheduler_steps_total") - before
    answer = response.json()
    assert answer["generated_texts"][:8] == alone
    assert len(answer["generated_texts"]) == len(answer["finish_reasons"]) == 64
    assert num_steps <= 12 + 8, "one prompt after the other would take hundreds"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_n_answers_compute_their_prompt_once(server: ServerProcess) -> None:
    """64 forks: the prompt's full blocks exist once, and each answer is the one that its seed gives alone."""
    prompt = "the cat sat on the mat and the dog looked at it " * 8 + "What color is the sky?"
    fields = {"temperature": 1.0, "seed": 7, "max_tokens": 16, "ignore_eos": True}
    computed = server.metric("servekit_iteration_tokens_sum")
    response = server.client.post("/generate", json={"prompt": prompt, "n": 64, **fields}).json()
    computed = server.metric("servekit_iteration_tokens_sum") - computed
    num_prompt_tokens = response["usage"]["prompt_tokens"]
    assert response["usage"]["completion_tokens"] == 64 * 16 and num_prompt_tokens < 200
    # The prompt once, and for each fork one prompt token and every output but the last.
    assert computed <= num_prompt_tokens + 64 * 16 + 64
    assert len(set(response["generated_texts"])) > 32
    for number in (0, 1, 63):
        alone = server.generate(prompt, **{**fields, "seed": 7 + number})
        assert response["generated_texts"][number] == alone["generated_text"]
    pairs = server.client.post("/generate", json={"prompts": ["Hello", prompt], "n": 2, "temperature": 0}).json()
    assert len(pairs["generated_texts"]) == len(pairs["finish_reasons"]) == 4
    assert (
        pairs["generated_texts"][2]
        == pairs["generated_texts"][3]
        == server.generate(prompt, temperature=0)["generated_text"]
    )
    refusal = server.client.post("/generate_stream", json={"prompt": "a", "n": 2})
    assert refusal.status_code == 400 and refusal.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"temperature": 1.5, "seed": 3, "max_tokens": 40},
        {"temperature": 3.0, "seed": 4, "max_tokens": 60, "ignore_eos": True},  # splits UTF-8 characters
        {"stop": ["zebra", " e"], "max_tokens": 60},
        {"temperature": 2.0, "seed": 5, "stop": ["a", "on"], "max_tokens": 60, "ignore_eos": True},
    ],
)
def test_a_stream_adds_up_to_the_answer(server: ServerProcess, fields: dict[str, Any]) -> None:
    prompt = "Tell me a story about a cat."
    whole = server.generate(prompt, **fields)
    stream = server.stream(prompt, **fields)
    assert "".join(event["token"]["text"] for event in stream) == whole["generated_text"]
    last = stream[-1]
    for key in ("generated_text", "finish_reason", "stop_reason", "usage"):
        assert last[key] == whole[key]
    assert [event["index"] for event in stream] == list(range(1, len(stream) + 1))
    assert all(event["generated_text"] is None and "finish_reason" not in event for event in stream[:-1])
    assert len(stream) == whole["usage"]["completion_tokens"]


def test_a_seed_gives_the_same_text_whatever_else_is_running(server: ServerProcess) -> None:
    fields = {"temperature": 1.2, "seed": 42, "max_tokens": 30, "ignore_eos": True}
    alone = server.generate("Once upon a time", **fields)["generated_text"]
    with ThreadPoolExecutor(12) as threads:
        crowd = [threads.submit(server.generate, f"Count to {i}.", max_tokens=40, temperature=1.0) for i in range(11)]
        assert server.generate("Once upon a time", **fields)["generated_text"] == alone
        assert all(future.result()["generated_text"] is not None for future in crowd)
    assert server.generate("Once upon a time", **{**fields, "seed": 43})["generated_text"] != alone


def test_stop_strings_are_cut_and_named(server: ServerProcess) -> None:
    answer = server.generate("What color is the sky?", stop=["blue", "nothing"])
    assert answer["stop_reason"] == "blue" and answer["finish_reason"] == "stop"
    assert "blue" not in answer["generated_text"]


def test_basic_generate_is_one_text_in_one_text_out(server: ServerProcess) -> None:
    response = server.client.post("/basic_generate", json={"prompt": "What color is the sky?"})
    assert response.json() == {"generated_text": server.generate("What color is the sky?")["generated_text"]}


@again_if_late
@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/basic_generate"])
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"prompt": 5}', 400, "invalid_value"),
        (b'{"prompt": "a", "temprature": 1}', 400, "unknown_field"),
        (b'{"prompt": "a", "max_tokens": 100000}', 400, "context_length_exceeded"),
        (b'{"prompt": "' + b"word " * 5000 + b'"}', 400, "context_length_exceeded"),
        (b'{"prompt": "' + b"x" * 9_000_000 + b'"}', 413, "request_too_large"),
    ],
)
def test_a_bad_request_is_refused_at_once(
    server: ServerProcess, route: str, body: bytes, status: int, code: str
) -> None:
    elapsed_s = []
    for _ in range(3):  # other programs may delay one of them
        started = time.perf_counter()
        response = server.client.post(route, content=body)
        elapsed_s.append(time.perf_counter() - started)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.json()["error"]["code"] == code
    if status == 400:
        assert_within(0.05, min(elapsed_s), "it is refused without a model's step")
    server.wait_until_at_rest()


@again_if_late
def test_prompt_that_is_far_too_long_delays_no_other_request(server: ServerProcess) -> None:
    """Megabytes that can never fit are refused before they are encoded."""
    body = b'{"prompt": "' + b"word " * 1_500_000 + b'"}'
    with ThreadPoolExecutor(2) as threads:
        refusals = [threads.submit(server.client.post, "/generate", content=body) for _ in range(4)]
        time.sleep(0.05)
        started = time.perf_counter()
        server.generate("Hello", max_tokens=1)
        elapsed_s = time.perf_counter() - started
        for refusal in refusals:
            assert refusal.result().json()["error"]["code"] == "context_length_exceeded"
    assert_within(1.0, elapsed_s, "encoding it takes seconds")


def test_list_of_prompts_is_admitted_as_a_whole_or_not_at_all(server: ServerProcess) -> None:
    response = server.client.post("/generate", json={"prompts": ["fine", "word " * 5000, "fine"]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompts[1]"
    server.wait_until_at_rest()
    response = server.client.post("/generate", json={"prompts": ["word " * 5000]})
    assert response.json()["error"]["param"] == "prompts[0]"
    response = server.client.post("/generate_stream", json={"prompts": ["a", "b"]})
    assert response.status_code == 400
    response = server.client.post("/generate", json={"prompts": ["a"] * 1025})
    assert response.status_code == 400 and "the limit is 1024" in response.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_closing_the_connection_frees_the_blocks(server: ServerProcess, route: str, delay_s: float) -> None:
    server.wait_until_at_rest()
    body = b'{"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": true}'
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        deadline = time.monotonic() + 60
        while not server.metric("servekit_num_requests_running"):
            assert time.monotonic() < deadline
        time.sleep(delay_s)
        assert server.metric("servekit_num_requests_running") == 1
        computed = server.metric("servekit_generation_tokens_total")
    server.wait_until_at_rest()
    assert server.metric("servekit_generation_tokens_total") - computed < 1000, "it ends long before 1900 tokens"


def test_streams_run_side_by_side(server: ServerProcess) -> None:
    """The first events of eight streams all come before the last event of any."""
    clients = [httpx2.Client(base_url=server.url, timeout=60) for _ in range(8)]
    start = Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        spans = list(threads.map(_span, clients, [start] * 8))
    assert max(first for first, _ in spans) < min(last for _, last in spans)


def _span(client: httpx2.Client, start: Barrier) -> tuple[float, float]:
    body = {"prompt": "Count to 20.", "max_tokens": 120, "ignore_eos": True}
    start.wait()
    with client, client.stream("POST", "/generate_stream", json=body) as response:
        times = [time.monotonic() for line in response.iter_lines() if line.startswith("data: ")]
    return times[0], times[-1]


def test_server_information_routes(server: ServerProcess) -> None:
    client = server.client
    assert (client.get("/health").status_code, client.get("/health").content) == (200, b"")
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/version").json()["version"].count(".") == 2
    info = client.get("/info").json()
    assert info["worker"]["model"]["architecture"] == "LlamaForCausalLM"
    assert info["settings"]["model"] == "demo" and info["max_total_tokens"] == 2048
    assert client.get("/nowhere").status_code == 404
    not_allowed = client.get("/generate")
    assert (not_allowed.status_code, not_allowed.headers["allow"]) == (405, "POST")
    assert not_allowed.json()["error"]["code"] == "method_not_allowed"
    assert client.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    metrics = client.get("/metrics").text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "step_overhead_seconds"):
        assert f"servekit_{name}_bucket" in metrics


def test_log_describes_the_model_and_an_example_request(server: ServerProcess) -> None:
    log = server.log.read_text()
    for expected in (": loading demo", "loading LlamaForCausalLM", "KV cache", "blocks", "longest sequences"):
        assert expected in log
    assert f"curl {server.url}/generate" in log
    assert f"port                     {server.port}" in log


def test_penalties_and_biases_change_the_answer(server: ServerProcess) -> None:
    prompt = "What color is the sky?"
    plain = server.stream(prompt, temperature=0)
    likeliest = plain[0]["token"]["id"]
    banned = server.stream(prompt, temperature=0, logit_bias={str(likeliest): -100}, max_tokens=8)
    assert likeliest not in [event["token"]["id"] for event in banned]
    longer = server.generate(prompt, temperature=0, min_tokens=len(plain) + 5)
    assert longer["usage"]["completion_tokens"] >= len(plain) + 5
    forced = server.stream(prompt, temperature=0, logit_bias={str(likeliest): 100}, max_tokens=8, ignore_eos=True)
    assert [event["token"]["id"] for event in forced] == [likeliest] * 8
    varied = server.stream(
        prompt, temperature=0, logit_bias={str(likeliest): 5}, max_tokens=30, frequency_penalty=2, ignore_eos=True
    )
    assert len({event["token"]["id"] for event in varied}) > 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
    ],
)
def test_options_out_of_range_are_refused(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    response = server.client.post("/generate", json={"prompt": "a", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param
