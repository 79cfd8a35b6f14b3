"""Distil a draft model for speculative decoding from the demo model, in one command and from a seed.

The draft model reads the same kind of corpus. At each position of an answer it learns the probabilities that the demo
model gives to the next token, and not the token of the corpus: a draft is right if the demo model would say the same.
Its embedding begins as the best approximation of the demo model's in fewer dimensions.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from corpus import COPY_ALPHABETS, Batch
from distillation import SHORT_LENGTH, SHORT_ROWS, Progress, Teacher, distance, hidden_states, parse_arguments
from torch import nn
from train import MAX_GRADIENT, Run, build_optimizers, set_rates
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 2  # the least that finds what followed a token before, which all copying needs
HIDDEN = 128
HEAD = 32
STEPS = 1300
COPY_SHARE = 0.15  # of all steps: at first random copies only, as for the demo model
FILES = ("config.json", "generation_config.json", "model.safetensors")  # the tokenizer is the demo model's


def build_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A small Llama with the tokens of `target`, whose embedding is that of `target` projected to fewer dimensions."""
    settings = target.config.to_dict() | {
        "hidden_size": HIDDEN,
        "intermediate_size": 352,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
    }
    draft = LlamaForCausalLM(LlamaConfig(**settings)).float()
    for name, parameter in draft.named_parameters():
        if parameter.ndim == 2:
            writes_residual = "o_proj" in name or "down_proj" in name
            nn.init.normal_(parameter, std=0.01 if writes_residual else 0.03)
    embedding = target.get_input_embeddings().weight.detach().float()
    left, scales, _ = torch.linalg.svd(embedding, full_matrices=False)
    draft.get_input_embeddings().weight.data.copy_(left[:, :HIDDEN] * scales[:HIDDEN])
    return draft


def step_batches(teacher: Teacher, step: int, steps: int) -> list[Batch]:
    """What the models read in this step."""
    copy_steps = int(steps * COPY_SHARE)
    if step >= copy_steps:
        return teacher.batches(step)
    alphabet = COPY_ALPHABETS[step * len(COPY_ALPHABETS) // copy_steps]
    return [teacher.corpus.copy_batch(step, alphabet, SHORT_ROWS, SHORT_LENGTH)]


def train_step(run: Run, teacher: Teacher, batches: list[Batch]) -> tuple[float, float]:
    """One update from all the batches; returns the mean loss, and how often both models' likeliest tokens agree."""
    num_learned = sum(int((batch.labels[:, 1:] >= 0).sum()) for batch in batches)
    total = num_right = 0.0
    for batch in batches:
        is_learned = batch.labels[:, 1:] >= 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = teacher.model.lm_head(teacher.hidden_states(batch)[:, :-1][is_learned])
            logits = run.model.lm_head(hidden_states(run.model, batch)[:, :-1][is_learned])
        loss = distance(logits, wanted) / num_learned
        loss.backward()
        total += loss.item()
        num_right += float((logits.argmax(-1) == wanted.argmax(-1)).sum())
    nn.utils.clip_grad_norm_(run.model.parameters(), MAX_GRADIENT)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total, num_right / num_learned


def export(draft: LlamaForCausalLM, directory: Path) -> None:
    """Write the draft model in bfloat16, moving only whole files into place."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as unfinished:
        draft.to(torch.bfloat16).save_pretrained(unfinished)
        for file in FILES:
            shutil.move(Path(unfinished) / file, directory / file)


def main() -> None:
    """Train and export."""
    arguments = parse_arguments((__doc__ or "").partition("\n")[0], STEPS)
    teacher = Teacher(arguments.model, arguments.seed)
    draft = build_draft(teacher.model)
    run = Run(draft, build_optimizers(draft), arguments.steps, torch.device("cpu"))
    progress = Progress(run.steps)
    for step in range(run.steps):
        set_rates(run, step)
        progress.add(step, *train_step(run, teacher, step_batches(teacher, step, run.steps)))
    export(draft, arguments.out)


if __name__ == "__main__":
    main()
