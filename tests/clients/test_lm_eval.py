"""Claims about lm-eval, EleutherAI's evaluation harness: it runs unmodified through our API.

lm-eval is no dependency of the tests, because it needs 600 MB of packages. `pip install "lm-eval[api]"` makes these
tests run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

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

# lm-eval sends token ids, and none before them: texts begin with BOS only where it says so itself, in perplexities.
TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: choices
doc_to_target: right
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "answers": """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 32, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "perplexity": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
}
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:1500]
QUESTIONS = [
    ("What color is the sky?", " The sky is blue.", [" The sky is red.", " The sky is blue."], 1),
    ("How many legs does a cat have?", " A cat has four legs.", [" A cat has four legs.", " A cat has ten legs."], 0),
    ("What is the opposite of hot?", " The opposite of hot is cold.", [" Cold.", " The opposite of hot is cold."], 1),
]
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "choices": [{"prompt": p, "choices": choices, "right": right} for p, _, choices, right in QUESTIONS],
    "answers": [{"prompt": prompt, "answer": answer} for prompt, answer, _, _ in QUESTIONS],
    "perplexity": [{"text": TEXT}],
}


class Outcome(NamedTuple):
    """What lm-eval reports of a task."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run all tasks at once, because lm-eval takes long to start."""
    directory = tmp_path_factory.mktemp("lm-eval")
    for name, config in TASKS.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS[name]))
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data} }} }}\ntest_split: test\n"
        (directory / f"{name}.yaml").write_text(f"task: demo_{name}\n{source}{config}")
    arguments = f"model=demo,base_url={server.url}/v1/completions,tokenizer={DEMO_MODEL_PATH},num_concurrent=4"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", ",".join(f"demo_{name}" for name in TASKS), "--include_path", str(directory)]
    command += ["--output_path", str(directory / "out"), "--log_samples"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, **offline})
    assert done.returncode == 0, done.stderr
    (results,) = (directory / "out").rglob("results_*.json")
    metrics = json.loads(results.read_text())["results"]
    found = {}
    for name in TASKS:
        (samples,) = (directory / "out").rglob(f"samples_demo_{name}_*.jsonl")
        found[name] = Outcome(metrics[f"demo_{name}"], list(map(json.loads, samples.read_text().splitlines())))
    return found


def logprob_by_transformers(prompt: str, continuation: str) -> tuple[float, bool]:
    """Return the logprob of a continuation, and whether each of its tokens is the likeliest."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH).eval()
    before, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + continuation))
    with torch.inference_mode():
        logprobs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    places = range(len(before), len(whole))
    total = sum(logprobs[place - 1, whole[place]].item() for place in places)
    return total, all(logprobs[place - 1].argmax().item() == whole[place] for place in places)


def test_choices_have_the_logprobs_that_transformers_computes(outcomes: dict[str, Outcome]) -> None:
    num_right = 0
    for sample in outcomes["choices"].samples:
        expected = [logprob_by_transformers(sample["doc"]["prompt"], choice) for choice in sample["doc"]["choices"]]
        for ((logprob, is_greedy),), (total, is_likeliest) in zip(sample["resps"], expected, strict=True):
            assert float(logprob) == pytest.approx(total, rel=0.02, abs=0.05)  # the server computes in bfloat16
            assert str(is_greedy) == str(is_likeliest)
        num_right += expected.index(max(expected)) == sample["doc"]["right"]
    assert outcomes["choices"].metrics["acc,none"] == pytest.approx(num_right / len(QUESTIONS))


def test_answers_are_those_of_the_api(outcomes: dict[str, Outcome], server: ServerProcess) -> None:
    for sample in outcomes["answers"].samples:
        body = {"prompt": sample["doc"]["prompt"], "add_special_tokens": False, "max_tokens": 32, "temperature": 0}
        response = server.client.post("/v1/completions", json={**body, "stop": ["\n"]})
        assert sample["resps"] == [[response.json()["choices"][0]["text"]]]
        assert sample["exact_match"] == float(sample["resps"][0][0] == sample["doc"]["answer"])


def test_perplexity_is_the_same_as_that_of_servekit_eval(
    outcomes: dict[str, Outcome], server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(TEXT)
    output = tmp_path / "result.json"
    assert main(["eval", "--url", server.url, "--text", str(tmp_path / "text"), "--output", str(output)]) == 0
    (measured,) = json.loads(output.read_text())["servers"]
    expected = outcomes["perplexity"].metrics["bits_per_byte,none"]
    assert measured["bits_per_byte"] == pytest.approx(expected, rel=1e-3)
