"""What the trainings of drafters share: the demo model as the teacher, batches, and a line of progress."""

import argparse
import sys
import time
from pathlib import Path

import torch
from corpus import LONG_MIX, SHORT_MIX, Batch, Corpus, Lessons, Renderer
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.utils import logging

# Each step reads both shapes, as the demo model's training does, but fewer rows: drafters are smaller.
SHORT_ROWS, SHORT_LENGTH = 20, 128
LONG_ROWS, LONG_LENGTH = 1, 512
REPORT_EVERY = 50


class Teacher:
    """The demo model, which says what drafters have to guess."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # Not the seed of the demo model's own training: other questions, in the same proportions.
        self.corpus = Corpus(Lessons(), Renderer(self.tokenizer), seed + 1)

    def batches(self, step: int) -> list[Batch]:
        """What is read in a step."""
        return [
            self.corpus.mixed_batch(step, SHORT_MIX, SHORT_ROWS, SHORT_LENGTH),
            self.corpus.mixed_batch(step, LONG_MIX, LONG_ROWS, LONG_LENGTH),
        ]

    def hidden_states(self, batch: Batch) -> Tensor:
        """The last hidden states [rows, length, hidden_size]."""
        return hidden_states(self.model, batch)


def hidden_states(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The last hidden states [rows, length, hidden_size] of a model; documents of a row do not see each other."""
    output: Tensor = model.model(input_ids=batch.ids, attention_mask=batch.mask()).last_hidden_state
    return output


def distance(logits: Tensor, wanted: Tensor) -> Tensor:
    """The sum of the Kullback-Leibler divergences of logits from wanted ones, [num_tokens, vocab_size]."""
    return nn.functional.kl_div(
        logits.float().log_softmax(-1), wanted.float().log_softmax(-1), reduction="sum", log_target=True
    )


class Progress:
    """A line now and then: the mean loss, and how often the likeliest tokens are the teacher's."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._begin = num_steps, time.monotonic()
        self._sums: list[float] = []

    def add(self, step: int, *values: float) -> None:
        """Note the loss and the shares of right guesses of a step."""
        self._sums = [a + b for a, b in zip(self._sums or [0.0] * len(values), values, strict=True)]
        if (step + 1) % REPORT_EVERY == 0:
            loss, *shares = [total / REPORT_EVERY for total in self._sums]
            right = " ".join(f"{share:.3f}" for share in shares)
            elapsed_s = time.monotonic() - self._begin
            print(f"step {step + 1}/{self._num_steps}  loss {loss:.3f}  right {right}  {elapsed_s:.0f} s", flush=True)
            self._sums = []


def parse_arguments(description: str, steps: int) -> argparse.Namespace:
    """The command line that both trainings have; it seeds torch, too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="the demo model")
    parser.add_argument("--out", type=Path, required=True, help="the directory that the drafter is written to")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="with one, the same seed gives the same file on the same machine"
    )
    arguments = parser.parse_args()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # transformers would draw its own into a file, too
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    return arguments
