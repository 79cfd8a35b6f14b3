"""transformers' own generate on the same shapes: the one to compare with that is always there."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.gpu.at_work import work
from benchmarks.gpu.measuring import synchronize
from benchmarks.gpu.reading import step_while_all_run
from benchmarks.gpu.session import Session, SkippedError
from benchmarks.gpu.shapes import Shape
from workers.pieces import release_memory

FEW, MANY = 8, 72  # tokens of an answer: the difference is what decode steps take
COMPILE_S = 150.0  # that a static cache needs before its first answer, at most
NO_TOKEN = 2**31 - 1  # an id that no model samples


def run(session: Session) -> None:
    transformers_logging.set_verbosity_error()
    for shape in session.shapes:
        model = _make(session, shape)
        for batch in (1, 8, 32) if session.on_gpu else (1, 2):
            for way, options in _WAYS.items():
                with session.row("transformers", shape=shape.name, batch=batch, way=way) as row:
                    row |= _measure(session, model, shape, batch, way, options)
        del model


def _make(session: Session, shape: Shape) -> Any:
    """As transformers makes it: initialised on the device, attention by torch."""
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
        raise SkippedError("compiling takes minutes, so one size is enough")
    if way == COMPILED and session.left_s < COMPILE_S + 60:
        raise SkippedError("no time was left to compile")
    if session.left_s < 20:
        raise SkippedError("no time was left")
    if way == IN_BATCHES:
        told = _in_batches(session, model, prompts, 2 * many)
        return {**told, "tokens_per_s": batch / told["step_s"]}
    _generate(model, prompts, few, options)
    few_s, many_s = (_seconds(session, lambda n=n: _generate(model, prompts, n, options)) for n in (few, many))
    step_s = (many_s - few_s) / (many - few)
    assert step_s > 0, "more tokens took less time"
    return {
        "step_s": step_s,
        "tokens_per_s": batch / step_s,
        "whole_tokens_per_s": batch * many / many_s,  # the prompts' time counts, too
        "context": session.context,
    }


def _seconds(session: Session, call: Callable[[], int]) -> float:
    """The quicker one of two."""
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
    """Continuous batching, which switches the model's attention to a paged one.

    It computes in a thread of its own, where tensors that were made in inference mode may not be written to, and takes
    seconds to begin and to end: so steps are read off the times at which tokens came.
    """
    before = model.config._attn_implementation
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)
    options: dict[str, Any] = {"generation_config": config, "record_timestamps": True, "progress_bar": False}
    if not session.on_gpu:
        from transformers import ContinuousBatchingConfig  # not at the top: an older one has none

        # Or it takes most of the machine's memory for its cache, and the kernel ends somebody.
        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    try:
        told = model.generate_batch(inputs=prompts.tolist(), **options)
    finally:
        model.set_attn_implementation(before)
    errors = {str(each.error) for each in told.values() if each.error}
    assert not errors, errors
    times = [each.timestamps for each in told.values()]
    assert len(times) == len(prompts) and {len(each) for each in times} == {num_tokens}, "answers are missing"
    return {"step_s": step_while_all_run(times), "context": session.context}


COMPILED, IN_BATCHES = "static cache, compiled", "continuous batching"
_WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    IN_BATCHES: {},
    COMPILED: {"cache_implementation": "static"},
}


if __name__ == "__main__":
    work(run)
