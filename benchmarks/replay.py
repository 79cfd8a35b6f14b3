"""Compare what a replay with other settings says with what a real engine with these settings does.

One run with the first settings is recorded. Its journal is replayed with each of the others, and each of them is
also given to a real engine, which serves the same requests at the same times. The first row is a replay with the same
settings, which shows how exact a replay is; all others are also off by what differs between two real runs.

    python -m benchmarks.replay [--model demo]

It takes three minutes. By default the model is simulated: its steps sleep, so other programs disturb it little.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.progress import progress, tell
from servekit.embedded.async_llm import AsyncLLM
from servekit.embedded.sampling_params import SamplingParams
from servekit.laboratory.workload import LabRequest
from servekit.laboratory.workload_generator import make_workload
from servekit.observability.journal import read_header
from servekit.replaying.changed_run import ChangedRun
from servekit.replaying.command import ReplayOptions, change_settings, read_run
from servekit.replaying.run_record import Figures

FIRST: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_kv_blocks": 160,
    "scheduling_policy": "fcfs",
    "max_steps_in_flight": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "the same settings": {},
    "--max-num-seqs 5": {"max_num_seqs": 5},
    "--max-num-seqs 16": {"max_num_seqs": 16},
    "--scheduling-policy shortest": {"scheduling_policy": "shortest"},
    "--num-kv-blocks 60": {"num_kv_blocks": 60},
    "--max-num-batched-tokens 32": {"max_num_batched_tokens": 32},
    "--no-enable-prefix-caching": {"enable_prefix_caching": False},
}
FIGURES = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
JOURNAL_BYTES = 2**40


async def ask(llm: AsyncLLM, request: LabRequest) -> None:
    params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0)
    async for _ in llm.generate(list(request.prompt), params, stream=False):
        pass


async def serve(journal: Path, model: str, settings: dict[str, Any], requests: tuple[LabRequest, ...]) -> None:
    """Serve requests at their times, and record it."""
    async with AsyncLLM(
        model, journal=str(journal), journal_max_bytes=JOURNAL_BYTES, max_model_len=512, **{**FIRST, **settings}
    ) as llm:
        loop = asyncio.get_running_loop()
        began_s, tasks = loop.time() + 0.1, []
        for request in requests:
            await asyncio.sleep(max(0.0, began_s + request.arrival_s - loop.time()))
            tasks.append(asyncio.create_task(ask(llm, request)))
        await asyncio.gather(*tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sim:step=8ms,prefill=60us,decode=400us")
    parser.add_argument("--rate", type=float, default=11.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    requests = make_workload("chat", round(options.rate * options.seconds), 7, options.rate).requests
    tell(f"{len(requests)} requests to {options.model}, {options.rate:g} in a second\n")
    names = [name.removesuffix("_s").replace("_", " ") for name in FIGURES]
    tell("| settings | " + " | ".join(f"{name} | replayed | off" for name in names) + " |")
    tell("|---|" + "---:|---:|---:|" * len(FIGURES))
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first"
        asyncio.run(serve(first, options.model, {}, requests))
        header = read_header(first)
        recorded = read_run(first, header.config)
        times = recorded.step_times()
        assert times is not None
        for name, changes in progress(CASES.items(), "settings", lambda each: each[0]):
            config, _ = change_settings(header.config, ReplayOptions(file=first, **changes))
            replayed = ChangedRun(recorded, config, times).play().figures()
            real = recorded.record.figures()
            if changes:
                path = Path(folder) / "other"
                asyncio.run(serve(path, options.model, changes, requests))
                real = read_run(path, read_header(path).config).record.figures()
                path.unlink()
            tell(f"| {name} | " + " | ".join(cells(real, replayed, each) for each in FIGURES) + " |")


def cells(real: Figures, replayed: Figures, name: str) -> str:
    one, other = getattr(real, name), getattr(replayed, name)
    if name == "tokens_per_s":
        return f"{one:.0f} | {other:.0f} | {other / one - 1.0:+.1%}"
    return f"{1e3 * one:.1f} ms | {1e3 * other:.1f} ms | {other / one - 1.0:+.1%}"


if __name__ == "__main__":
    main()
