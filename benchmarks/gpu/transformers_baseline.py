"""Time transformers' generate on the same shapes. It is always installed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.gpu.parsing import step_while_all_run
from benchmarks.gpu.session import Session, SkippedError
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.stage_process import run_stage
from benchmarks.gpu.timing import synchronize
from workers.device.memory import release_memory

FEW, MANY = 8, 72  # tokens of an answer; the difference of both times is that of the decode steps
COMPILE_S = 150.0  # time that compilation may take before the first answer
NO_TOKEN = 2**31 - 1  # an id that no model samples


def run(session: Session) -> None:
    transformers_logging.set_verbosity_error()
    for shape in session.shapes:
        model = _make(session, shape)
        for batch in (1, 8, 32) if session.on_gpu else (1, 2):
            for way, options in _MODES.items():
                with session.row("transformers", shape=shape.name, batch=batch, way=way) as row:
                    row |= _measure(session, model, shape, batch, way, options)
        del model


def _make(session: Session, shape: Shape) -> Any:
    """Make a model as transformers does: initialised on the device, with torch's attention."""
    with session.model_folder(shape) as folder:
        config = AutoConfig.from_pretrained(folder)
    with torch.device(session.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.generation_config.eos_token_id = NO_TOKEN
    model.generation_config.pad_token_id = 0
    return model.eval()


def _measure(
    session: Session, model: Any, shape: Shape, batch: int, way: str, options: dict[str, Any]
) -> dict[str, float]:
    release_memory()
    few, many = (FEW, MANY) if session.on_gpu else (2, 6)
    prompts = torch.randint(3, shape.vocab_size, (batch, session.context), device=session.device)
    if way == COMPILED and (batch > 1 or shape is not session.shapes[0]):
        raise SkippedError("compilation takes minutes, so one size is enough")
    if way == COMPILED and session.left_s < COMPILE_S + 60:
        raise SkippedError("too little time was left to compile")
    if session.left_s < 20:
        raise SkippedError("too little time was left")
    if way == IN_BATCHES:
        figures = _in_batches(session, model, prompts, 2 * many)
        return {**figures, "tokens_per_s": batch / figures["step_s"]}
    _generate(model, prompts, few, options)
    few_s, many_s = (_seconds(session, lambda n=n: _generate(model, prompts, n, options)) for n in (few, many))
    step_s = (many_s - few_s) / (many - few)
    assert step_s > 0, "more tokens took less time"
    return {
        "step_s": step_s,
        "tokens_per_s": batch / step_s,
        "whole_tokens_per_s": batch * many / many_s,  # includes the time of the prompts
        "context": session.context,
    }


def _seconds(session: Session, call: Callable[[], int]) -> float:
    """Return the shorter time of two calls."""
    times = []
    for _ in range(2):
        synchronize(session.device)
        started = time.perf_counter()
        call()
        synchronize(session.device)
        times.append(time.perf_counter() - started)
    return min(times)


def _generate(model: Any, prompts: torch.Tensor, num_tokens: int, options: dict[str, Any]) -> int:
    with torch.inference_mode():
        whole = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            **options,
        )
    assert whole.shape[1] == prompts.shape[1] + num_tokens, whole.shape
    return int(whole[0, -1])


def _in_batches(session: Session, model: Any, prompts: torch.Tensor, num_tokens: int) -> dict[str, float]:
    """Time continuous batching, which switches the model to paged attention.

    It computes in a thread of its own, which may not write to tensors made in inference mode, and takes seconds to
    start and to stop. So step times are computed from the times of the tokens.
    """
    before = model.config._attn_implementation
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)
    options: dict[str, Any] = {"generation_config": config, "record_timestamps": True, "progress_bar": False}
    if not session.on_gpu:
        from transformers import ContinuousBatchingConfig  # not at the top: an older one has none

        # By default its cache takes most of the machine's memory, and the kernel kills a process.
        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    try:
        outputs = model.generate_batch(inputs=prompts.tolist(), **options)
    finally:
        model.set_attn_implementation(before)
    errors = {str(each.error) for each in outputs.values() if each.error}
    assert not errors, errors
    times = [each.timestamps for each in outputs.values()]
    assert len(times) == len(prompts) and {len(each) for each in times} == {num_tokens}, "answers are missing"
    return {"step_s": step_while_all_run(times), "context": session.context}


COMPILED, IN_BATCHES = "static cache, compiled", "continuous batching"
_MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    IN_BATCHES: {},
    COMPILED: {"cache_implementation": "static"},
}


if __name__ == "__main__":
    run_stage(run)
