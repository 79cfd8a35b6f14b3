"""Train the demo model from a seed in one command: corpus, tokenizer, weights; or go on with one that was trained.

The order of lessons matters more than their number. A small model learns facts within minutes but
takes very long to learn to look back at its prompt, which repeating, reading and
counting all need. So training begins with copying random tokens over a growing alphabet, which
teaches just that, and only then turns to language. Muon, for the layer matrices, finds the copying
circuit several times sooner than AdamW does.

`--finetune DIRECTORY` teaches a trained model what the corpus has gained since. It reads all lessons in the same mix,
so that nothing is forgotten, at a lower rate, and does not begin with random copies.
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from corpus import COPY_ALPHABETS, LONG_MIX, SHORT_MIX, Batch, Corpus, Lessons, Renderer
from tokenizer import BOS, EOS, MAX_LENGTH, PAD, VOCABULARY_SIZE, learn_tokenizer, save_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

LAYERS = 4
HIDDEN = 256
HEAD = 64

# Each step reads both shapes: short rows waste no attention on other documents, long ones hold the
# stories and conversations.
SHORT_ROWS, SHORT_LENGTH = 36, 128
LONG_ROWS, LONG_LENGTH = 3, 512
STEP_TOKENS = SHORT_ROWS * SHORT_LENGTH + LONG_ROWS * LONG_LENGTH

STEPS = 2000
COPY_STEPS = 320
WARMUP_STEPS = 50
DECAY_SHARE = 0.7
MUON_RATE = 0.02
ADAM_RATE = 0.003
MAX_GRADIENT = 1.0
FINETUNE_STEPS = 150
FINETUNE_RATE = 0.3  # of the rates above

TOKENIZER_TEXTS = 30_000
REPORT_EVERY = 50
SAVE_EVERY = 50


class Run(NamedTuple):
    """What a training run needs besides its data."""

    model: LlamaForCausalLM
    optimizers: tuple[Optimizer, ...]
    steps: int
    device: torch.device
    copy_steps: int = 0  # at the start, with nothing but random copies


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama whose initial scales let the copying circuit form early."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=_initial_scale(name))
    return model


def _initial_scale(name: str) -> float:
    if "embed_tokens" in name:
        return 0.06
    # What writes to the residual stream starts small, so that depth does not drown the tokens.
    writes_residual = "o_proj" in name or "down_proj" in name
    return 0.02 / math.sqrt(2 * LAYERS) if writes_residual else 0.02


def build_optimizers(model: LlamaForCausalLM, rate: float = 1.0) -> tuple[Optimizer, ...]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms. `rate`: a share of their usual rates."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(parameter)
    optimizers = (
        Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.0),
        AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"] * rate
    return optimizers


def rate_factor(step: int, steps: int) -> float:
    """Warm up, hold, then fall to nothing: most of the polish comes from the fall."""
    warmup = (step + 1) / WARMUP_STEPS
    decay = (steps - step) / (steps * DECAY_SHARE)
    return min(1.0, warmup, decay)


def step_batches(corpus: Corpus, step: int, copy_steps: int) -> list[Batch]:
    """What the model reads in this step: at first random copies only, then everything."""
    if step < copy_steps:
        alphabet = COPY_ALPHABETS[step * len(COPY_ALPHABETS) // copy_steps]
        return [corpus.copy_batch(step, alphabet, STEP_TOKENS // SHORT_LENGTH, SHORT_LENGTH)]
    return [
        corpus.mixed_batch(step, SHORT_MIX, SHORT_ROWS, SHORT_LENGTH),
        corpus.mixed_batch(step, LONG_MIX, LONG_ROWS, LONG_LENGTH),
    ]


def predict(run: Run, body: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits at the positions that are learned, and the tokens that belong there."""
    targets = batch.labels[:, 1:].to(run.device)
    learned = targets >= 0
    with torch.autocast(run.device.type, dtype=torch.bfloat16):
        hidden = body(input_ids=batch.ids.to(run.device), attention_mask=batch.mask().to(run.device)).last_hidden_state
        logits = run.model.lm_head(hidden[:, :-1][learned])
    return logits.float(), targets[learned]


def set_rates(run: Run, step: int) -> None:
    """Give every optimizer its learning rate for this step."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate_factor(step, run.steps)


def train_step(run: Run, body: nn.Module, batches: list[Batch]) -> float:
    """One update from all the batches; returns the mean loss per learned token."""
    learned = sum(int((batch.labels[:, 1:] >= 0).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        logits, targets = predict(run, body, batch)
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / learned
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(run.model.parameters(), MAX_GRADIENT)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total


@torch.no_grad()
def copy_accuracy(run: Run, corpus: Corpus) -> float:
    """How many tokens of a second copy are right: whether the model can look back at all."""
    probe = corpus.copy_batch(-1, None, 8, SHORT_LENGTH)
    logits, targets = predict(run, run.model.model, probe)
    return (logits.argmax(-1) == targets).float().mean().item()


def save_checkpoint(run: Run, path: Path, step: int) -> None:
    """Write everything a resumed run needs, never leaving half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load_checkpoint(run: Run, path: Path) -> int:
    """Restore a run and return the first step it has yet to make."""
    state = torch.load(path, map_location=run.device)
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


def train(run: Run, corpus: Corpus, first_step: int, checkpoint: Path) -> None:
    """Make the remaining steps, with a line of progress now and then, and a bar at a terminal."""
    body = torch.compile(run.model.model, dynamic=False)
    since = time.monotonic()
    with progress_bar(first_step, run.steps) as bar:
        for step in range(first_step, run.steps):
            set_rates(run, step)
            loss = train_step(run, body, step_batches(corpus, step, run.copy_steps))
            done = step + 1
            bar.set_postfix_str(f"step {done}, loss {loss:.3f}", refresh=False)
            bar.update(STEP_TOKENS)
            if done % REPORT_EVERY == 0:
                speed = REPORT_EVERY * STEP_TOKENS / (time.monotonic() - since)
                copied = copy_accuracy(run, corpus)
                tqdm.write(f"step {done}/{run.steps}  loss {loss:.3f}  copy {copied:.2f}  {speed:.0f} tokens/s")
                sys.stdout.flush()
                since = time.monotonic()
            if done % SAVE_EVERY == 0:
                save_checkpoint(run, checkpoint, done)


def progress_bar(first_step: int, steps: int) -> tqdm:
    """How many tokens were read, how fast, and how long it will take; nothing where standard error is no terminal."""
    return tqdm(
        initial=first_step * STEP_TOKENS,
        total=steps * STEP_TOKENS,
        unit=" tokens",
        unit_scale=True,
        disable=None,
        dynamic_ncols=True,
        desc="training",
    )


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the model in bfloat16 next to its tokenizer, moving only whole files into place.

    Its config.json says that CPUs compute it in float32, so that its tokens are the same on all of them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = model.to("cpu", torch.bfloat16)
    model.config.servekit_cpu_dtype = "float32"
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    with tempfile.TemporaryDirectory(dir=directory.parent) as unfinished:
        model.save_pretrained(unfinished)
        save_tokenizer(tokenizer, Path(unfinished))
        for file in Path(unfinished).iterdir():
            shutil.move(file, directory / file.name)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the finished model goes")
    parser.add_argument("--finetune", type=Path, help="a trained demo model to go on with")
    parser.add_argument("--steps", type=int, help=f"{STEPS}, or {FINETUNE_STEPS} with --finetune")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo_model/checkpoint.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args()


def begin(arguments: argparse.Namespace, lessons: Lessons) -> tuple[Run, Tokenizer]:
    """A run that has made no step: with a new tokenizer and random weights, or with those of a trained model."""
    device = torch.device(arguments.device)
    if arguments.finetune is None:
        steps = arguments.steps or STEPS
        tokenizer = learn_tokenizer(lessons.texts(TOKENIZER_TEXTS, arguments.seed))
        model = build_model(tokenizer).to(device)
        return Run(model, build_optimizers(model), steps, device, min(COPY_STEPS, steps // 4)), tokenizer
    tokenizer = Tokenizer.from_file(str(arguments.finetune / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(arguments.finetune, dtype=torch.float32).to(device)
    return Run(model, build_optimizers(model, FINETUNE_RATE), arguments.steps or FINETUNE_STEPS, device), tokenizer


def main() -> None:
    """Train and export."""
    arguments = parse_arguments()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # transformers would draw its own into a file, too
    torch.manual_seed(arguments.seed)
    lessons = Lessons()
    run, tokenizer = begin(arguments, lessons)
    corpus = Corpus(lessons, Renderer(tokenizer), arguments.seed)
    first_step = load_checkpoint(run, arguments.checkpoint) if arguments.resume else 0
    train(run, corpus, first_step, arguments.checkpoint)
    export(run.model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
