"""How far the worker's numbers are from exact ones, and how often that changes a token.

    python -m benchmarks.accuracy [--model PATH] [--dtype bfloat16] [--prompts 1000]

Each prompt is continued greedily by servekit's worker, in mixed batches, and by transformers' `generate`, in the same
dtype and in float32. For each pair it prints the share of equal tokens, up to and with the first that differs: after it
the texts differ. Logits are those of a prompt's last token, and their error is relative to
transformers in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.progress import no_bars_in_files, progress
from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.inprocess import InProcessEngine
from workers.loading.model_manager import ModelManager

NO_TOKEN = 2**31  # an id that no model samples
AT_ONCE = 50
PROMPT_LENGTH = 32


def by_generate(model: torch.nn.Module, prompts: Tensor, num_tokens: int) -> list[list[int]]:
    with torch.inference_mode():
        whole = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=[NO_TOKEN],
        )
    return whole[:, prompts.shape[1] :].tolist()


def batches(prompts: Tensor, source: str) -> Iterator[Tensor]:
    return progress(prompts.split(AT_ONCE), f"answers of {source}", lambda some: f"{len(some)} prompts")


def same(first: list[list[int]], second: list[list[int]]) -> tuple[float, float]:
    """Return the shares of answers and of tokens that are equal."""
    num_same = num_compared = num_whole = 0
    for ours, theirs in zip(first, second, strict=True):
        until = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        num_same += until
        num_compared += min(until + 1, len(ours))
        num_whole += until == len(ours)
    return num_whole / len(first), num_same / num_compared


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_PATH)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8_e4m3", "int8"])
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    arguments = parser.parse_args()
    no_bars_in_files()
    loaded = ModelManager("cpu").load(arguments.model, arguments.dtype, None)
    torch.manual_seed(0)
    prompts = torch.randint(3, loaded.info.vocab_size, (arguments.prompts, PROMPT_LENGTH))

    engine = InProcessEngine(
        loaded,
        num_blocks=1024,
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    sequences = []
    for some in batches(prompts, "servekit"):
        sequences += [engine.add(prompt, max_tokens=arguments.tokens, ignore_eos=True) for prompt in some.tolist()]
        engine.run()
    ours = [sequence.output_token_ids for sequence in sequences]
    paged = torch.cat([logits_of(engine, prompt) for prompt in prompts[:AT_ONCE].tolist()])

    exact, answers, errors = None, {}, {}
    for dtype in (torch.float64, torch.float32, getattr(torch, arguments.dtype)):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        with torch.inference_mode():
            logits = model(input_ids=prompts[:AT_ONCE], use_cache=False).logits[:, -1].double()
        exact = logits if exact is None else exact
        name = str(dtype).removeprefix("torch.")
        errors[f"transformers, {name}"] = error_of(logits, exact)
        if dtype is not torch.float64:
            batched = [by_generate(model, some, arguments.tokens) for some in batches(prompts, f"transformers, {name}")]
            answers[name] = [answer for batch in batched for answer in batch]
    errors[f"servekit, {arguments.dtype}"] = error_of(paged.double(), exact)

    kept = "" if arguments.kv_cache_dtype == "auto" else f", keys and values in {arguments.kv_cache_dtype}"
    size = f"{arguments.prompts} prompts of {PROMPT_LENGTH} tokens, answers of {arguments.tokens}"
    print(f"{arguments.model.name}: {size}{kept}")
    print("\n| greedy tokens of | and of | answers that are the same | tokens that are |\n|---|---|---:|---:|")
    pairs = [(f"servekit, {arguments.dtype}", ours, name, theirs) for name, theirs in answers.items()]
    if arguments.dtype != "float32":
        pairs.append((f"transformers, {arguments.dtype}", answers[arguments.dtype], "float32", answers["float32"]))
    for first, first_answers, second, second_answers in pairs:
        whole, token = same(first_answers, second_answers)
        print(f"| {first} | transformers, {second} | {100 * whole:.1f} % | {100 * token:.2f} % |")
    print("\n| logits of | relative error, median | worst |\n|---|---:|---:|")
    for name, error in errors.items():
        print(f"| {name} | {error.median():.1e} | {error.max():.1e} |")


def logits_of(engine: InProcessEngine, prompt: list[int]) -> Tensor:
    """Return the worker's logits [1, vocab_size] for the prompt's last token."""
    recorded: list[Tensor] = []
    choose = engine.runner._choose

    def record_and_choose(raw_logits: Tensor, *arguments: Any) -> Any:
        recorded.append(raw_logits.clone())
        return choose(raw_logits, *arguments)

    engine.runner._choose = record_and_choose
    engine.add(prompt, max_tokens=1, ignore_eos=True)
    engine.run()
    engine.runner._choose = choose
    return recorded[-1][-1:]


def error_of(logits: Tensor, exact: Tensor) -> Tensor:
    """Return errors [num_rows], relative to the norm of each row."""
    return (logits - exact).norm(dim=-1) / exact.norm(dim=-1)


if __name__ == "__main__":
    main()
