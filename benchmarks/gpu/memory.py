"""What is left for keys and values, in the log's words and in the device's; and whether many steps take more."""

from __future__ import annotations

import logging
import random

import torch

from benchmarks.gpu.at_work import work
from benchmarks.gpu.session import BLOCK_SIZE, Session
from benchmarks.worker_memory import resident_bytes
from tests.inprocess import InProcessEngine
from workers.model_manager import LoadedModel
from workers.model_runner import make_runner
from workers.pieces import release_memory

UTILIZATION = 0.9
GIB = 2**30
MOST_GROWTH = 2**28  # bytes, from a quarter of the steps to their end: what an allocator may still round up


def run(session: Session) -> None:
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    shape = session.shapes[0]
    loaded = session.load(shape)
    engine = _engine(session, loaded)
    with session.row("capacity", shape=shape.name) as row:
        told = _Sum()
        logging.getLogger("servekit.worker").addHandler(told)
        num_blocks = None if session.on_gpu else 256
        settings = session.settings(
            _most_running(session),
            1,
            num_kv_blocks=num_blocks,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=UTILIZATION,
        )
        runner = engine.runner = make_runner(loaded, settings)
        row["sum"] = told.text or "on a CPU nothing is rehearsed"
        row["num_tokens"] = runner.cache.num_blocks * BLOCK_SIZE
        row["cache_bytes"] = row["num_tokens"] * runner.kv_bytes_per_token
        if session.on_gpu:
            row["free_bytes"], total = torch.cuda.mem_get_info(session.device)
            row["kept_bytes"] = int((1 - UTILIZATION) * total)
            # What a step takes is not taken at this moment, so more must be free than is to be kept.
            assert row["free_bytes"] > 0.95 * row["kept_bytes"], "less is free than was to be left"
    with session.row("growth", shape=shape.name, step="all") as row:
        row |= _run_steps(session, engine)


def _most_running(session: Session) -> int:
    return 128 if session.on_gpu else 8


def _engine(session: Session, loaded: LoadedModel) -> InProcessEngine:
    """A scheduler over a pool that makes it preempt some. Its runner is to come: the one it has would take memory."""
    most_running = _most_running(session)
    engine = InProcessEngine(
        loaded,
        num_blocks=60 * most_running if session.on_gpu else 30,
        block_size=BLOCK_SIZE,
        max_num_seqs=most_running,
        max_num_batched_tokens=2048 if session.on_gpu else 64,
    )
    del engine.runner
    release_memory()
    return engine


class _Sum(logging.Handler):
    """The line that the worker logs of its KV cache."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "for keys and values" in record.getMessage():
            self.text = record.getMessage()


def _run_steps(session: Session, engine: InProcessEngine) -> dict[str, float]:
    """Requests of random lengths come and go."""
    num_steps, most_running = 2000 if session.on_gpu else 40, _most_running(session)
    most_prompt, most_answer = (1500, 400) if session.on_gpu else (40, 20)
    assert engine.runner.cache.num_blocks >= engine.manager.config.num_blocks, (
        "the device holds less than is planned with"
    )
    rng = random.Random(0)
    _reset_peak(session.device)
    quarter = None
    for step in range(num_steps + 1):
        while engine.manager.num_running + engine.manager.num_waiting < most_running + 4:
            prompt = [rng.randrange(3, 500) for _ in range(rng.randrange(1, most_prompt))]
            sampling = {"temperature": rng.choice([0.0, 1.0]), "top_p": rng.choice([0.5, 1.0]), "seed": step}
            engine.add(prompt, max_tokens=rng.randrange(1, most_answer), **sampling)
        engine.step()
        engine.logprobs.clear()  # the harness's, not the worker's
        assert session.left_s > 5, f"after {step} steps no time was left"
        if step % (num_steps // 4) == 0:
            now = _taken(session.device)
            session.write("growth", shape=session.shapes[0].name, step=step, **now)
            quarter = now if step == num_steps // 4 else quarter
    assert quarter is not None
    growth = now["reserved_bytes"] - quarter["reserved_bytes"]
    assert growth <= MOST_GROWTH, f"{growth / GIB:.2f} GiB more than after a quarter of the steps"
    return {**now, "growth_bytes": growth}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _taken(device: torch.device) -> dict[str, float]:
    """On a CPU the process's own memory stands for the device's."""
    resident = resident_bytes()
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
    work(run)
