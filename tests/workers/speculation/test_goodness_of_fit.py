"""The claim that tokens fit the model's own distribution however drafts are made. All seeds are fixed."""

from __future__ import annotations

import random
from itertools import product

import torch

from tests.support.drafters import WatchingDrafter
from tests.support.inprocess import InProcessEngine
from tests.workers.sampling.test_goodness_of_fit import MIN_P, p_value
from tests.workers.test_token_identity import prepared
from workers.loading.model_manager import LoadedModel

PROMPT = [5, 17, 40, 9]
ALLOWED = (11, 30, 31)
TEMPERATURE = 40.0  # the model's logits are far apart
NUM_ANSWERS = 1200


class SkewedDrafter(WatchingDrafter):
    """Guesses among the allowed tokens, one of them most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(4)

    def drafts_behind(self, tokens: list[int], max_drafts: int) -> tuple[int, ...]:
        return tuple(self._random.choices(ALLOWED, weights=(6, 2, 1), k=max_drafts))


def probabilities_of_answers(loaded: LoadedModel) -> torch.Tensor:
    """Return, for each answer of three allowed tokens, its probability, from transformers' own logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(loaded.model.name_or_path, dtype=torch.float32).eval()
    answers = list(product(range(len(ALLOWED)), repeat=3))
    token_ids = torch.tensor([[*PROMPT, *(ALLOWED[index] for index in answer)] for answer in answers])
    with torch.inference_mode():
        logits = model(token_ids).logits[:, len(PROMPT) - 1 : -1][..., list(ALLOWED)].double()
    chosen = torch.softmax(logits / TEMPERATURE, dim=-1).gather(-1, torch.tensor(answers)[..., None])
    return chosen[..., 0].prod(dim=-1)


def test_answers_with_drafts_fit_the_distribution_of_transformers() -> None:
    loaded, _ = prepared("llama")
    engine = InProcessEngine(
        loaded,
        num_blocks=400,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_drafts=2,
        drafter=SkewedDrafter(),
    )
    sequences = [
        engine.add(
            PROMPT,
            max_tokens=4,
            ignore_eos=True,
            allowed_token_ids=ALLOWED,
            temperature=TEMPERATURE,
            seed=seed,
        )
        for seed in range(NUM_ANSWERS)
    ]
    engine.run()
    counts = torch.zeros(3, 3, 3, dtype=torch.float64)
    for sequence in sequences:
        first, second, third, _ = (ALLOWED.index(token_id) for token_id in sequence.output_token_ids)
        counts[first, second, third] += 1
    assert sum(engine.manager.draft_lengths.num_accepted) > NUM_ANSWERS / 4
    expected = probabilities_of_answers(loaded)
    assert expected.min() * NUM_ANSWERS > 5, "too few of some answer are expected for the test to be valid"
    assert p_value(counts.flatten(), expected * NUM_ANSWERS) > MIN_P
