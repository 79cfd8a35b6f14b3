"""Claims about lm-eval, EleutherAI's evaluation harness: it runs unmodified through our API.

lm-eval is no dependency of the tests, because it needs 300 MB of packages. `pip install "lm-eval[api]"` makes these
tests run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from servekit.cli import main
from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.server_process import ServerProcess

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason='needs pip install "lm-eval[api]"'),
]

CHOICES = """\
task: demo_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data} }} }}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: choices
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ANSWERS = """\
task: demo_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data} }} }}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 32, do_sample: false}}
filter_list: [{{name: strip, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
"""
PERPLEXITY = """\
task: demo_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data} }} }}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
DOCUMENTS = [
    ("What color is the sky?", "The sky is blue.", [" The sky is red.", " The sky is blue."], 1),
    ("How many legs does a cat have?", "A cat has four legs.", [" A cat has four legs.", " A cat has ten legs."], 0),
    (
        "What is the capital of Japan?",
        "The capital of Japan is Tokyo.",
        [" Rome.", " The capital of Japan is Tokyo."],
        1,
    ),
]
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:1500]


def run_lm_eval(
    server: ServerProcess, directory: Path, task: str, config: str, documents: list[Any], adds_bos: bool = True
) -> dict[str, Any]:
    """Run a task of one file; return its results, and its samples under `samples`."""
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (directory / "task.yaml").write_text(config.format(data=data))
    arguments = f"model=demo,base_url={server.url}/v1/completions,tokenizer={DEMO_MODEL_PATH},add_bos_token={adds_bos}"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", task, "--include_path", str(directory)]
    command += ["--output_path", str(directory / "out"), "--log_samples"]
    environment = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    (results,) = (directory / "out").rglob("results_*.json")
    (samples,) = (directory / "out").rglob("samples_*.jsonl")
    found: dict[str, Any] = json.loads(results.read_text())["results"][task]
    return {**found, "samples": [json.loads(line) for line in samples.read_text().splitlines()]}


def logprob_by_transformers(prompt: str, continuation: str) -> tuple[float, bool]:
    """Return the logprob of a continuation, and whether each of its tokens is the likeliest."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH).eval()
    before, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + continuation)["input_ids"]
    with torch.inference_mode():
        logprobs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    places = range(len(before), len(whole))
    total = sum(logprobs[place - 1, whole[place]].item() for place in places)
    return total, all(logprobs[place - 1].argmax().item() == whole[place] for place in places)


def test_choices_have_the_logprobs_that_transformers_computes(server: ServerProcess, tmp_path: Path) -> None:
    documents = [{"prompt": p, "choices": choices, "right": right} for p, _, choices, right in DOCUMENTS]
    found = run_lm_eval(server, tmp_path, "demo_choices", CHOICES, documents)
    assert found["acc,none"] == 1.0
    for sample in found["samples"]:
        for choice, ((logprob, is_greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            expected, is_likeliest = logprob_by_transformers(sample["doc"]["prompt"], choice)
            assert float(logprob) == pytest.approx(expected, rel=0.02, abs=0.05)  # the server computes in bfloat16
            assert (str(is_greedy) == "True") == is_likeliest


def test_generated_answers_are_scored(server: ServerProcess, tmp_path: Path) -> None:
    documents = [{"prompt": prompt, "answer": answer} for prompt, answer, _, _ in DOCUMENTS]
    assert run_lm_eval(server, tmp_path, "demo_answers", ANSWERS, documents)["exact_match,strip"] == 1.0


def test_perplexity_is_the_same_as_that_of_servekit_eval(server: ServerProcess, tmp_path: Path) -> None:
    # lm-eval itself begins a text with BOS; with add_bos_token there would be two.
    found = run_lm_eval(server, tmp_path, "demo_perplexity", PERPLEXITY, [{"text": TEXT}], adds_bos=False)
    (tmp_path / "text").write_text(TEXT)
    output = tmp_path / "result.json"
    assert main(["eval", "--url", server.url, "--text", str(tmp_path / "text"), "--output", str(output)]) == 0
    (measured,) = json.loads(output.read_text())["servers"]
    assert measured["bits_per_byte"] == pytest.approx(found["bits_per_byte,none"], rel=1e-3)
