"""Claims about the drafters that come with the demo model: they are small, and are right often enough to pay."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.messages import LoadModel
from servekit.protocol.speculative_config import DEFAULT_MAX_DRAFTS, SpeculativeConfig
from tests.support.drafters import FixedDraftLengths
from tests.support.inprocess import InProcessEngine, load
from workers.speculation.choose import load_drafter

NUM_QUESTIONS = 8
# What was measured, less the noise of so few questions.
MIN_ACCEPTANCE = {"draft": 0.85, "medusa": 0.35}
MAX_SHARE = {"draft": 0.2, "medusa": 0.1}  # of the model's bytes


def num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@pytest.mark.parametrize("method", ["draft", "medusa"])
def test_drafters_of_the_demo_model_are_small_and_mostly_right(method: str) -> None:
    loaded = load(DEMO_MODEL_PATH)
    max_drafts = DEFAULT_MAX_DRAFTS[method]
    config = SpeculativeConfig(method, max_drafts=max_drafts)
    directory = Path(config.directory(str(DEMO_MODEL_PATH)))
    assert num_bytes(directory) < MAX_SHARE[method] * num_bytes(DEMO_MODEL_PATH)
    settings = LoadModel(str(DEMO_MODEL_PATH), "float32", "cpu", 16, 8, 512, None, 256, None, 0.9, speculative=config)
    drafter = load_drafter(loaded, settings)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    lines = (DEMO_MODEL_PATH / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["prompt"] for line in random.Random(1).sample(lines, NUM_QUESTIONS)]
    prompts = [tokenizer.encode(f"<|user|>{question}<eos><|assistant|>").ids for question in questions]
    answers = []
    for with_drafts in (False, True):
        engine = InProcessEngine(
            loaded,
            num_blocks=256,
            block_size=16,
            max_drafts=max_drafts,
            loaded_drafter=drafter if with_drafts else None,
        )
        num_drafts = max_drafts if with_drafts else 0
        engine.manager.draft_lengths = FixedDraftLengths(num_drafts, lambda _, num_drafts=num_drafts: num_drafts)
        sequences = [engine.add(prompt, max_tokens=60) for prompt in prompts]
        engine.run()
        answers.append([sequence.output_token_ids for sequence in sequences])
    assert answers[0] == answers[1]
    lengths = engine.manager.draft_lengths
    assert lengths.num_accepted[0] > MIN_ACCEPTANCE[method] * lengths.num_drafted[0] > 10
