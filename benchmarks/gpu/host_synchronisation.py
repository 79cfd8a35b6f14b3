"""Check that launches never wait for the device, and measure their time on the host and the device's idle time.

The check uses torch's sync debug mode, in which every operation that would wait raises.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import islice

import torch

from benchmarks.gpu.parsing import union_length
from benchmarks.gpu.records import Record
from benchmarks.gpu.sequences import GREEDY, Sequences, slot_assignment
from benchmarks.gpu.session import BLOCK_SIZE, Session, SkippedError
from benchmarks.gpu.stage_process import run_stage
from servekit.protocol.messages import ScheduledChunk, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from workers.loading.model_manager import LoadedModel
from workers.runner.model_runner import ModelRunner, make_runner

CONTEXT = 64
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(max_tokens=4096, temperature=0.8, seed=1),
    "top-k, top-p, min-p": SamplingParams(max_tokens=4096, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=1),
    "penalties": SamplingParams(
        max_tokens=4096, temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1, seed=1
    ),
    "logprobs": SamplingParams(max_tokens=4096, temperature=0.0, logprobs=5),
    "typical-p": SamplingParams(max_tokens=4096, temperature=0.8, typical_p=0.5, seed=1),
    "biases": SamplingParams(max_tokens=4096, temperature=0.0, logit_bias=((7, 30.0), (9, -4.0))),
    "allowed tokens": SamplingParams(max_tokens=4096, temperature=0.8, allowed_token_ids=(40, 41, 42), seed=1),
    "bad words": SamplingParams(max_tokens=4096, temperature=0.8, bad_words=((40, 41), (42,), (41, 41, 40)), seed=1),
    "minimum of tokens": SamplingParams(max_tokens=4096, min_tokens=4000, temperature=0.0, stop_token_ids=(2, 40)),
}


def run(session: Session) -> None:
    shape = session.shapes[-1]  # the smallest, in which launches take the largest share
    loaded = session.load(shape)
    for name, sampling in SAMPLINGS.items():
        with session.row("waits", what=f"decode, {name}") as row:
            row |= _launch_strictly(session, loaded, sampling, mixed=False)
    for name in ("greedy", "top-k, top-p, min-p"):
        with session.row("waits", what=f"a prompt beside decodes, {name}") as row:
            row |= _launch_strictly(session, loaded, SAMPLINGS[name], mixed=True)
    for batch in session.batches:
        with session.row("launches", shape=shape.name, batch=batch) as row:
            _time_launches(session, loaded, batch, row)


def _launch_strictly(
    session: Session, loaded: LoadedModel, sampling: SamplingParams, mixed: bool
) -> dict[str, float | str]:
    """Launch without the debug mode first, because kernels are compiled and graphs captured; then with it."""
    runner = make_runner(loaded, session.settings(5, 4 * CONTEXT))
    sequences = Sequences(runner, 4, CONTEXT, 2 * CONTEXT, sampling)
    plans = _with_prompts(sequences, sampling) if mixed else sequences.plans()
    for plan in islice(plans, 3):
        runner.execute(plan)
    plan = next(plans)
    if not session.on_gpu:
        runner.execute(plan)
        raise SkippedError("a CPU has no queue to wait for")
    torch.cuda.set_sync_debug_mode("error")
    try:
        started = time.perf_counter()
        pending = runner.launch(plan)
        launch_s = time.perf_counter() - started
        was_done = pending.is_done()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    result = pending.finish()
    assert len(result.token_ids) == len(plan.chunks), result
    assert pending.is_done(), "a finished step is not reported as done"
    return {"launch_s": launch_s, "was_done": str(was_done)}


def _with_prompts(sequences: Sequences, sampling: SamplingParams) -> Iterator[StepPlan]:
    """Return steps in which a new sequence gets the fifth slot and computes its prompt, beside four that decode."""
    blocks = tuple(range(4 * -(-3 * CONTEXT // BLOCK_SIZE), 4 * -(-3 * CONTEXT // BLOCK_SIZE) + CONTEXT // BLOCK_SIZE))
    for plan in sequences.plans():
        assignment = slot_assignment(4, sampling, CONTEXT)
        chunk = ScheduledChunk(4, 0, CONTEXT, tuple(range(3, 3 + CONTEXT)), blocks, samples=True)
        yield StepPlan(plan.epoch, plan.step_id, (assignment,), (*plan.chunks, chunk))


def _time_launches(session: Session, loaded: LoadedModel, batch: int, row: Record) -> None:
    """Measure the host's time of a step, and the device's idle share with two steps in flight.

    `row` is filled in measurement by measurement, because a later one may fail.
    """
    num_steps = 40 if session.on_gpu else 3
    runner = make_runner(loaded, session.settings(batch, session.context + 4 * num_steps))
    sequences = Sequences(runner, batch, session.context, 4 * num_steps)
    sequences.run(3)
    row["launch_s"] = _launch_s(runner, sequences.plans(), num_steps)
    row["step_s"] = statistics.median(sequences.run(num_steps))
    if session.on_gpu:
        row["idle"] = _idle_share(sequences, num_steps)


def _launch_s(runner: ModelRunner, plans: Iterator[StepPlan], num_steps: int) -> float:
    """Return the median seconds of a launch on the host, while the step before it is in flight."""
    times, pending = [], None
    for plan in islice(plans, num_steps):
        started = time.perf_counter()
        following = runner.launch(plan)
        times.append(time.perf_counter() - started)
        if pending is not None:
            pending.finish()
        pending = following
    if pending is not None:
        pending.finish()
    return statistics.median(times)


def _idle_share(sequences: Sequences, num_steps: int) -> float | None:
    """Return the device's idle share by the profiler, or None if it saw nothing.

    It is an upper bound, because the profiler slows the host down.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        sequences.run(num_steps)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    spans = [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == cuda]
    if not spans:
        return None
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return 1 - union_length(spans) / whole


if __name__ == "__main__":
    run_stage(run)
