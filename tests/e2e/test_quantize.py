"""`servekit quantize` as a user runs it: what it writes is served, and an interrupt leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.default_signals import heed_interrupts
from tests.support.quantize_command import demo_documents, dequantized, make_model_with_tokenizer, write_texts
from tests.support.server_process import serving

pytestmark = pytest.mark.long  # it loads many models

QUESTION = "What color is the sky?"
COMMAND = [sys.executable, "-m", "servekit", "quantize"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", demo_documents())


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("demo", ["--method", "gptq", "--group-size", "64"]),
        ("random", ["--method", "awq", "--group-size", "16"]),
        ("random", ["--method", "gptq", "--group-size", "16", "--symmetric"]),
        ("random", ["--method", "rtn", "--scheme", "w8a16"]),
    ],
    ids=lambda value: "-".join(value[1::2]) if isinstance(value, list) else value,
)
def test_a_server_answers_as_the_dequantized_model(model: str, flags: list[str], texts: Path, tmp_path: Path) -> None:
    name, output = model, tmp_path / "out"
    if model == "random":
        name = str(tmp_path / "model")
        make_model_with_tokenizer(Path(name))
    if "rtn" not in flags:
        flags = [*flags, "--calibration", str(texts), "--num-samples", "16", "--max-length", "128"]
    done = subprocess.run(
        [*COMMAND, name, str(output), *flags], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "layer 3 of" in done.stderr and f"servekit serve {output}" in done.stderr
    plain = dequantized(output, tmp_path / "plain")
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    prompt = tokenizer.encode(QUESTION).ids
    with torch.inference_mode():
        expected = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=[-1])
    with serving("--model", str(output), "--dtype", "float32", log=tmp_path / "log") as server:
        answer = server.generate(QUESTION, max_tokens=16, ignore_eos=True, temperature=0.0)["generated_text"]
        assert server.client.get("/info").json()["worker"]["model"]["quantization"].startswith("compressed-tensors")
    assert answer == tokenizer.decode(expected[0, len(prompt) :].tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(sent: signal.Signals, texts: Path, tmp_path: Path) -> None:
    arguments = ["demo", str(tmp_path / "out"), "--method", "gptq", "--calibration", str(texts)]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--num-samples", "100", "--max-length", "200"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stderr is not None
    with process, process.stderr as lines:
        log = []
        for line in lines:
            log.append(line)
            if "layer 1 of 4" in line:
                assert [path.name.startswith(".out.") for path in tmp_path.iterdir()] == [True]
                os.kill(process.pid, sent)
        assert process.wait(timeout=120) == 128 + sent, "".join(log)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    command = [*COMMAND, "demo", str(tmp_path), "--method", "rtn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "exists and is not empty" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
