"""Time vLLM on the same shapes, in this process, with prompts as token ids; skipped if it is not installed."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.session import Session, SkippedError, require_modules
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.stage_process import run_stage

FEW, MANY = 8, 72  # tokens of an answer; the difference of both times is that of the decode steps


def run(session: Session) -> None:
    require_modules(["vllm"], "the engine to compare with")
    if not session.on_gpu:
        raise SkippedError("vLLM is measured on a GPU only")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for shape in session.shapes:
        with session.model_folder(shape) as folder:
            _measure(session, shape, folder)
        _release()


def _measure(session: Session, shape: Shape, folder: Path) -> None:
    engine = None
    with session.row("vllm", shape=shape.name, what="load") as row:
        started = time.monotonic()
        engine = _load(session, folder)
        row["load_s"] = time.monotonic() - started
    if engine is None:
        return
    for batch in session.batches:
        with session.row("vllm", shape=shape.name, what="decode", batch=batch) as row:
            row |= _decode(engine, shape, batch, session.context)
    with session.row("vllm", shape=shape.name, what="prefill", batch=1) as row:
        num_tokens = 8 * session.context
        _seconds(engine, shape, 1, num_tokens, 1, offset=1)
        row["seconds"] = _seconds(engine, shape, 1, num_tokens, 1, offset=2)
        row["tokens_per_s"] = num_tokens / row["seconds"]


def _load(session: Session, folder: Path) -> Any:
    from vllm import LLM

    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=8 * session.context + 64,
        max_num_seqs=max(session.batches),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.85,
        seed=0,
    )


def _release() -> None:
    """Free the memory for the next shape. Nothing refers to the engine any more."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    torch.cuda.empty_cache()


def _decode(engine: Any, shape: Shape, batch: int, context: int) -> dict[str, float]:
    _seconds(engine, shape, batch, context, FEW, offset=0)
    few_s, many_s = (_seconds(engine, shape, batch, context, n, offset=n) for n in (FEW, MANY))
    step_s = (many_s - few_s) / (MANY - FEW)
    assert step_s > 0, "more tokens took less time"
    return {"step_s": step_s, "tokens_per_s": batch / step_s, "whole_tokens_per_s": batch * MANY / many_s}


def _seconds(engine: Any, shape: Shape, batch: int, context: int, num_tokens: int, offset: int) -> float:
    """Time answers to the same prompts as servekit's, shifted by `offset` so that no prefix is cached."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(row * 7919 + i * 31 + offset) % shape.vocab_size for i in range(context)]}
        for row in range(batch)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    lengths = {len(each.outputs[0].token_ids) for each in outputs}
    assert lengths == {num_tokens}, f"answers of {lengths} tokens"
    return seconds


if __name__ == "__main__":
    run_stage(run)
