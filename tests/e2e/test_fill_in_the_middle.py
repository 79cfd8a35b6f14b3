"""`suffix` with a model whose tokenizer has the marks: the answer is that of transformers to the published prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import ollama
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.server_process import ServerProcess, serving

# The demo model's special tokens get the names that Qwen2.5-Coder has for the marks.
MARKS = {
    "<|system|>": "<|fim_prefix|>",
    "<|user|>": "<|fim_suffix|>",
    "<|assistant|>": "<|fim_middle|>",
    "<pad>": "<|fim_pad|>",
}
FIM_PAD = 0  # the id of the token that ends the text between the two others
BEFORE, AFTER = "What color is", "the sky?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = copytree(DEMO_MODEL_PATH, tmp_path_factory.mktemp("coder") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        for special, mark in MARKS.items():
            text = text.replace(special, mark)
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def coder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ["--model", str(model), "--served-model-name", "coder"]
    with serving(*arguments, log=tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def transformers_answer(model: Path, prompt: str, max_tokens: int) -> str:
    """Return what transformers' greedy search writes after the prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    computed: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    encoded = tokenizer(prompt, return_tensors="pt")
    token_ids = computed.generate(**encoded, max_new_tokens=max_tokens, do_sample=False)[0]
    text: str = tokenizer.decode(token_ids[encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.long
def test_the_answer_fills_in_what_stands_between_prompt_and_suffix(coder: ServerProcess, model: Path) -> None:
    prompt = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"  # as Qwen2.5-Coder's page writes it
    expected = transformers_answer(model, prompt, 12)
    fields: dict[str, Any] = {"model": "coder", "prompt": BEFORE, "suffix": AFTER, "temperature": 0, "max_tokens": 12}
    with OpenAI(base_url=f"{coder.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.completions.create(**fields)
        streamed = client.completions.create(stream=True, **fields)
        assert answer.choices[0].text == expected != ""
        assert "".join(chunk.choices[0].text for chunk in streamed) == expected
        ended = client.completions.create(logit_bias={str(FIM_PAD): 100}, **fields).choices[0]
    assert (ended.text, ended.finish_reason) == ("", "stop"), "the mark ends the answer, and is no part of it"


@pytest.mark.long
def test_ollamas_client_fills_in_text_as_well(coder: ServerProcess, model: Path) -> None:
    prompt = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    with ollama.Client(coder.url) as client:
        answer = client.generate("coder", BEFORE, suffix=AFTER, options={"temperature": 0, "num_predict": 12})
        capabilities = client.show("coder").capabilities or ()
    assert answer.response == transformers_answer(model, prompt, 12)
    assert "insert" in capabilities
