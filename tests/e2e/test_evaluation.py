"""Claims about `servekit eval` with real servers. What transformers computes is the outside truth."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from servekit.cli import main
from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.scripted_server import scripted_server
from tests.support.server_process import ServerProcess, serving
from tests.support.tiny_models import ARCHITECTURES, make_model

pytestmark = pytest.mark.long  # it starts many servers

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:3000]
BOS = 1


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo model's tokenizer."""
    directory = tmp_path_factory.mktemp("random")
    model_type, configuration = ARCHITECTURES["llama"]
    make_model(directory, model_type, {**configuration, "vocab_size": 2048})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_PATH / name, directory)
    return directory


@pytest.fixture(scope="module")
def random_server(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log_file = tmp_path_factory.mktemp("random-server") / "log"
    with serving("--model", str(random_model), "--dtype", "float32", log=log_file) as server:
        yield server


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    (tmp_path / "text").write_text(TEXT)
    return str(tmp_path / "text")


def evaluate(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `servekit eval`; return its exit code and its JSON."""
    output = tmp_path / "result.json"
    exit_code = main(["eval", *arguments, "--output", str(output)])
    return exit_code, json.loads(output.read_text())


def loss_by_transformers(path: Path, token_ids: list[int], length: int, stride: int) -> float:
    """Return the mean loss, as Hugging Face's page on perplexity computes it, with BOS before each window."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    total, last_end = 0.0, 0
    for begin in range(0, len(token_ids), stride):
        end = min(begin + length, len(token_ids))
        input_ids = torch.tensor([[BOS, *token_ids[begin:end]]])
        labels = input_ids.clone()
        labels[:, : last_end - end] = -100
        with torch.inference_mode():
            total += model(input_ids=input_ids, labels=labels).loss.item() * (end - last_end)
        last_end = end
        if end == len(token_ids):
            break
    return total / len(token_ids)


@pytest.mark.parametrize("has_tokenizer_file", [False, True])
def test_perplexity_is_what_transformers_computes(
    random_server: ServerProcess, random_model: Path, text_file: str, tmp_path: Path, has_tokenizer_file: bool
) -> None:
    arguments = ["--url", random_server.url, "--text", text_file, "--window", "64", "--stride", "20"]
    if has_tokenizer_file:
        arguments += ["--tokenizer", str(random_model / "tokenizer.json")]
    exit_code, found = evaluate(tmp_path, *arguments)
    token_ids = Tokenizer.from_file(str(random_model / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    loss = loss_by_transformers(random_model, token_ids, 63, 20)
    (measured,) = found["servers"]
    assert exit_code == 0 and measured["num_text_tokens"] == len(token_ids)
    assert log(measured["perplexity"]["estimate"]) == pytest.approx(loss, rel=1e-4)
    bits = loss * len(token_ids) / log(2) / len(TEXT.encode())
    assert measured["bits_per_byte"] == pytest.approx(bits, rel=1e-4)


def test_each_document_of_a_text_is_read_without_the_others(
    random_server: ServerProcess, random_model: Path, tmp_path: Path
) -> None:
    documents = [TEXT[:700], TEXT[700:1000], "a"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    arguments = ["--url", random_server.url, "--text", str(tmp_path / "text.jsonl"), "--window", "64"]
    _, found = evaluate(tmp_path, *arguments, "--stride", "20")
    tokenizer = Tokenizer.from_file(str(random_model / "tokenizer.json"))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in documents]
    losses = [loss_by_transformers(random_model, token_ids, 63, 20) * len(token_ids) for token_ids in encoded]
    loss = sum(losses) / sum(map(len, encoded))
    assert log(found["servers"][0]["perplexity"]["estimate"]) == pytest.approx(loss, rel=1e-4)


def test_a_server_compared_with_itself_is_the_same(server: ServerProcess, text_file: str, tmp_path: Path) -> None:
    arguments = ["--url", server.url, "--against", server.url, "--text", text_file, "--questions", "demo"]
    exit_code, found = evaluate(tmp_path, *arguments, "--limit", "40")
    comparison = found["comparison"]
    assert exit_code == 0 and not found["losses"]
    assert comparison["perplexity"]["increase"]["estimate"] == pytest.approx(0.0, abs=1e-5)
    assert comparison["categories"][0]["difference"]["estimate"] == 0.0
    assert comparison["agreement"]["num_identical"] == 40


def test_the_demo_model_answers_its_questions(server: ServerProcess, tmp_path: Path) -> None:
    for form in ([], ["--chat"]):
        _, found = evaluate(tmp_path, "--url", server.url, "--questions", "demo", "--limit", "60", *form)
        assert found["servers"][0]["categories"][0]["share"]["estimate"] > 0.8


def test_a_worse_model_is_seen(
    server: ServerProcess, random_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = server.generate("Tell me a story about a fox.", max_tokens=200, temperature=0.0)["generated_text"]
    (tmp_path / "text").write_text(f"Tell me a story about a fox. {story.strip()}")
    arguments = ["--text", str(tmp_path / "text"), "--questions", "demo", "--limit", "20", "--window", "128"]
    exit_code, found = evaluate(tmp_path, "--url", random_server.url, "--against", server.url, *arguments)
    assert exit_code == 1 and any("perplexity" in loss for loss in found["losses"])
    assert any("all questions" in loss for loss in found["losses"])
    assert found["comparison"]["perplexity"]["increase"]["low"] > 1.0
    assert "LOSS: " in capsys.readouterr().out
    # The other way round, it is a gain.
    assert evaluate(tmp_path, "--url", server.url, "--against", random_server.url, *arguments)[0] == 0


def test_the_choice_with_the_highest_probability_is_the_answer(server: ServerProcess, tmp_path: Path) -> None:
    questions = [
        ("What color is the sky?", [" The sky is red.", " The sky is blue."], 1),
        ("What is the capital of Japan?", [" The capital of Japan is Tokyo.", " The capital of Japan is Paris."], 0),
    ]
    lines = [
        json.dumps({"prompt": prompt, "choices": choices, "answer": choices[right]})
        for prompt, choices, right in questions
    ]
    (tmp_path / "choices.jsonl").write_text("\n".join(lines))
    _, found = evaluate(tmp_path, "--url", server.url, "--questions", str(tmp_path / "choices.jsonl"))
    assert found["servers"][0]["categories"][0]["num_right"] == 2


def test_a_judge_that_prefers_the_first_place_decides_nothing(
    server: ServerProcess, random_server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "open.jsonl").write_text('{"prompt": "Hello", "max_tokens": 5}\n{"prompt": "Hi", "max_tokens": 5}\n')
    arguments = ["--url", server.url, "--against", random_server.url, "--questions", str(tmp_path / "open.jsonl")]
    with scripted_server() as judge:
        reply = {"choices": [{"message": {"role": "assistant", "content": "The first. [[A]]"}}]}
        judge.scripts["/v1/chat/completions"] = [[json.dumps(reply).encode()]]
        exit_code, found = evaluate(tmp_path, *arguments, "--judge-url", judge.url, "--judge-model", "wise")
    assert exit_code == 0 and len(judge.asked) == 4 and judge.asked[0][1]["model"] == "wise"
    assert found["comparison"]["judgement"]["num_ties"] == 2


def test_servers_with_different_tokenizers_are_not_compared_by_perplexity(
    server: ServerProcess, text_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with scripted_server() as other:
        other.scripts["/tokenize"] = [[b'{"tokens": [1, 2, 3]}']]
        assert main(["eval", "--url", server.url, "--against", other.url, "--text", text_file]) == 2
    assert "tokenizers of the two servers differ" in capfd.readouterr().err


def test_a_quantization_is_compared_with_the_same_model_without_it(tmp_path: Path) -> None:
    arguments = ["demo", "--quantization", "int4", "--questions", "demo", "--limit", "40"]
    _, found = evaluate(tmp_path, *arguments)
    assert [server["model"] for server in found["servers"]] == ["demo int4", "demo"]
    assert found["comparison"]["categories"][0]["num"] == 40
    assert found["comparison"]["agreement"]["num_identical"] < 40, "the first server has other weights"


def test_a_model_alone_is_served_for_the_evaluation(tmp_path: Path, text_file: str) -> None:
    exit_code, found = evaluate(tmp_path, "demo", "--text", text_file)
    assert exit_code == 0 and found["comparison"] is None and len(found["servers"]) == 1


def test_a_model_that_cannot_be_served_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "demo", "--quantization", "int3", "--questions", "demo"]) == 2
    errors = capfd.readouterr().err
    assert "int3" in errors and "the server of 'demo' ended with exit code 2" in errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--questions", "demo"], "give either --url"),
        (["demo", "--url", "http://127.0.0.1:9", "--questions", "demo"], "give either --url"),
        (["--url", "http://127.0.0.1:9", "--quantization", "int4", "--questions", "demo"], "needs a MODEL to serve"),
    ],
)
def test_a_server_or_a_model_is_evaluated_and_not_both(
    arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "nothing to evaluate"),
        (["--text", "missing"], "missing: No such file"),
        (["--questions", "missing"], "missing: No such file"),
        (["--questions", "demo", "--judge-url", "http://judge"], "--judge-model"),
        (["--questions", "demo", "--judge-url", "http://judge", "--judge-model", "wise"], "--against"),
        (["--text", "text", "--window", "8", "--stride", "9"], "would skip tokens"),
        (["--questions", "demo", "--output", "result.txt"], ".json or .md"),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_refused(
    arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--url", "http://127.0.0.1:9", *arguments]) == 2
    assert reason in capfd.readouterr().err


def test_the_markdown_file_is_what_is_printed(
    server: ServerProcess, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", "--url", server.url, "--text", text_file, "--output", str(tmp_path / "result.md")]
    assert main(arguments) == 0
    assert (tmp_path / "result.md").read_text() == capsys.readouterr().out


def test_perplexity_is_the_exponential_of_the_loss_in_the_interval(
    server: ServerProcess, text_file: str, tmp_path: Path
) -> None:
    _, found = evaluate(tmp_path, "--url", server.url, "--text", text_file)
    perplexity = found["servers"][0]["perplexity"]
    assert 1.0 < perplexity["low"] < perplexity["estimate"] < perplexity["high"] < exp(20)
