"""Compare the KV cache's size with the device's free memory, and check that memory does not grow over many steps."""

from __future__ import annotations

import logging
import os
import random

import torch

from benchmarks.gpu.session import BLOCK_SIZE, Session
from benchmarks.gpu.stage_process import run_stage
from benchmarks.open_streams import resident_bytes
from tests.support.inprocess import InProcessEngine
from workers.device.memory import release_memory
from workers.loading.model_manager import LoadedModel
from workers.runner.model_runner import make_runner

UTILIZATION = 0.9
GIB = 2**30
MAX_GROWTH_BYTES = 2**28  # from a quarter of the steps to the end; an allocator may still round up


def run(session: Session) -> None:
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    shape = session.shapes[0]
    loaded = session.load(shape)
    engine = _engine(session, loaded)
    with session.row("capacity", shape=shape.name) as row:
        logged = _CacheLogLine()
        logging.getLogger("servekit.worker").addHandler(logged)
        num_blocks = None if session.on_gpu else 256
        settings = session.settings(
            _max_running(session),
            1,
            num_kv_blocks=num_blocks,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=UTILIZATION,
        )
        runner = engine.runner = make_runner(loaded, settings)
        row["sum"] = logged.text or "a CPU needs no memory profiling"
        row["num_tokens"] = runner.cache.num_blocks * BLOCK_SIZE
        row["cache_bytes"] = row["num_tokens"] * runner.kv_bytes_per_token
        if session.on_gpu:
            row["free_bytes"], total = torch.cuda.mem_get_info(session.device)
            row["kept_bytes"] = int((1 - UTILIZATION) * total)
            # No step runs now, so more must be free than the share that is kept free.
            assert row["free_bytes"] > 0.95 * row["kept_bytes"], "less memory is free than should be"
    with session.row("growth", shape=shape.name, step="all") as row:
        row |= _run_steps(session, engine)


def _max_running(session: Session) -> int:
    return 128 if session.on_gpu else 8


def _engine(session: Session, loaded: LoadedModel) -> InProcessEngine:
    """Return a scheduler whose pool is so small that it preempts. Its runner is replaced later, to save memory now."""
    max_running = _max_running(session)
    engine = InProcessEngine(
        loaded,
        num_blocks=60 * max_running if session.on_gpu else 30,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_running,
        max_num_batched_tokens=2048 if session.on_gpu else 64,
    )
    del engine.runner
    release_memory()
    return engine


class _CacheLogLine(logging.Handler):
    """Keep the line that the worker logs about its KV cache."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "for keys and values" in record.getMessage():
            self.text = record.getMessage()


def _run_steps(session: Session, engine: InProcessEngine) -> dict[str, float]:
    """Run requests of random lengths."""
    num_steps, max_running = 2000 if session.on_gpu else 40, _max_running(session)
    max_prompt, max_answer = (1500, 400) if session.on_gpu else (40, 20)
    assert engine.runner.cache.num_blocks >= engine.manager.config.num_blocks, (
        "the device has fewer blocks than the scheduler uses"
    )
    rng = random.Random(0)
    _reset_peak(session.device)
    quarter = None
    for step in range(num_steps + 1):
        while engine.manager.num_running + engine.manager.num_waiting < max_running + 4:
            prompt = [rng.randrange(3, 500) for _ in range(rng.randrange(1, max_prompt))]
            sampling = {"temperature": rng.choice([0.0, 1.0]), "top_p": rng.choice([0.5, 1.0]), "seed": step}
            engine.add(prompt, max_tokens=rng.randrange(1, max_answer), **sampling)
        engine.step()
        engine.logprobs.clear()  # kept by the harness, not by the worker
        assert session.left_s > 5, f"after {step} steps too little time was left"
        if step % (num_steps // 4) == 0:
            now = _taken(session.device)
            session.write("growth", shape=session.shapes[0].name, step=step, **now)
            quarter = now if step == num_steps // 4 else quarter
    assert quarter is not None
    growth = now["reserved_bytes"] - quarter["reserved_bytes"]
    assert growth <= MAX_GROWTH_BYTES, f"{growth / GIB:.2f} GiB more than after a quarter of the steps"
    return {**now, "growth_bytes": growth}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _taken(device: torch.device) -> dict[str, float]:
    """Return the memory in use; on a CPU, the process's own."""
    resident = resident_bytes(os.getpid())
    if device.type != "cuda":
        return {"peak_bytes": resident, "reserved_bytes": resident, "resident_bytes": resident}
    free, _ = torch.cuda.mem_get_info(device)
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "free_bytes": free,
        "resident_bytes": resident,
    }


if __name__ == "__main__":
    run_stage(run)
