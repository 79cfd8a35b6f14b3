"""Time decode steps at several batch sizes, and the prefill of a long prompt, and compare with their minimum."""

from __future__ import annotations

import time

from benchmarks.gpu.sequences import GREEDY, Sequences
from benchmarks.gpu.session import BLOCK_SIZE, Session
from benchmarks.gpu.shapes import GOALS, Ceilings, Shape, decode_floor_s, prefill_floor_s
from benchmarks.gpu.stage_process import run_stage
from benchmarks.gpu.timing import call_s
from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan
from workers.device.memory import release_memory
from workers.loading.model_manager import LoadedModel
from workers.runner.model_runner import ModelRunner, make_runner


def run(session: Session) -> None:
    ceilings = session.ceilings()
    for shape in session.shapes:
        started = time.monotonic()
        loaded = session.load(shape)
        load_s = time.monotonic() - started
        for batch in session.batches:
            with session.row("steps", shape=shape.name, what="decode", batch=batch) as row:
                row |= {"context": session.context, "load_s": load_s}
                row |= _decode(session, loaded, shape, batch, ceilings)
        with session.row("steps", shape=shape.name, what="prefill", batch=1) as row:
            row |= {"context": 8 * session.context}
            row |= _prefill(session, loaded, shape, 8 * session.context, ceilings)
        del loaded


def _decode(
    session: Session, loaded: LoadedModel, shape: Shape, batch: int, ceilings: Ceilings
) -> dict[str, float | str | None]:
    num_steps = 50 if session.on_gpu else 3
    max_steps = num_steps + 8
    release_memory()  # of the last runner, which is in a reference cycle with its graphs
    runner = make_runner(loaded, session.settings(batch, session.context + max_steps))
    sequences = Sequences(runner, batch, session.context, max_steps)
    step_s = sequences.step_s(num_steps)
    floor_s = decode_floor_s(shape, batch, session.context, ceilings)
    return {
        "step_s": step_s,
        "floor_s": floor_s,
        "share": floor_s / step_s,
        "goal": GOALS.get((shape.name, "decode", batch)),
        "tokens_per_s": batch / step_s,
        "prefill_tokens_per_s": batch * session.context / sequences.prefill_s,
        "attention": runner.attention.name,
    }


def _prefill(
    session: Session, loaded: LoadedModel, shape: Shape, num_tokens: int, ceilings: Ceilings
) -> dict[str, float | str | None]:
    runner = ModelRunner(loaded, session.settings(1, num_tokens + 1))
    token_ids = tuple(i * 31 % loaded.info.vocab_size for i in range(num_tokens))
    row = ScheduledChunk(0, 0, num_tokens, token_ids, tuple(range(-(-num_tokens // BLOCK_SIZE))), samples=True)
    plan = StepPlan(0, 0, (SlotAssignment(slot=0, sampling=GREEDY, prompt_length=num_tokens),), (row,))
    step_s = call_s(lambda: runner.execute(plan), loaded.device, 5 if session.on_gpu else 1)
    floor_s = prefill_floor_s(shape, num_tokens, ceilings)
    return {
        "step_s": step_s,
        "floor_s": floor_s,
        "share": floor_s / step_s,
        "goal": GOALS.get((shape.name, "prefill", 1)),
        "tokens_per_s": num_tokens / step_s,
        "attention": runner.attention.name,
    }


if __name__ == "__main__":
    run_stage(run)
