"""A GGUF file is served as it is: its weights, its tokenizer and its chat template, by a real server."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.gguf_files import write_gguf
from tests.support.server_process import serving

pytestmark = pytest.mark.long  # it loads many models

QUESTION = "What color is the sky?"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gguf_file_answers_as_the_model_that_its_blocks_mean(num_ranks: int, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32).eval()
    whole = (DEMO_MODEL_PATH / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(whole)
    metadata = {
        "tokenizer.huggingface.json": whole,
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())],
        "tokenizer.ggml.token_type": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.chat_template": json.loads((DEMO_MODEL_PATH / "tokenizer_config.json").read_text())["chat_template"],
    }
    model.load_state_dict(write_gguf(tmp_path / "model.gguf", model, "Q8_0", metadata))
    prompt = tokenizer.encode(QUESTION).ids
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=[-1])
    environment = {"XDG_CACHE_HOME": str(cache_with_kernels(tmp_path))}
    arguments = ("--model", str(tmp_path / "model.gguf"), "--tensor-parallel-size", str(num_ranks))
    with serving(*arguments, log=tmp_path / "log", environment=environment) as server:
        fields = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
        answer = server.generate(QUESTION, **fields)["generated_text"]
        assert answer == tokenizer.decode(output[0, len(prompt) :].tolist(), skip_special_tokens=True)
        assert server.client.get("/info").json()["worker"]["model"]["quantization"] == "GGUF"
        chat = {"model": str(tmp_path / "model.gguf"), "messages": [{"role": "user", "content": QUESTION}]}
        response = server.client.post("/v1/chat/completions", json={**chat, "max_tokens": 4})
        assert response.status_code == 200


def cache_with_kernels(folder: Path) -> Path:
    """Return an empty cache, but for the C kernels that are compiled already: that takes longer than the test."""
    cache = folder / "servekit"
    cache.mkdir(mode=0o700)
    known = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "servekit"
    for library in known.glob("*.so"):
        shutil.copy2(library, cache)
    return folder
