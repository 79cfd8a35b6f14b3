"""Run the tests that mean more on a GPU than in an interpreter, file by file, so that one that hangs hides no other."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.parsing import counts, summary_line
from benchmarks.gpu.requirements import REQUIRED_BY_SERVER
from benchmarks.gpu.session import ROOT, Session, SkippedError, environment, require_modules
from benchmarks.gpu.stage_process import run_stage

SERVERS = "e2e/test_devices.py"  # two workers on this GPU, and on two GPUs if there are as many
FILES = (
    "workers/attention/test_triton_kernels.py",
    "workers/attention/test_triton_rotary.py",
    "workers/layers/test_triton_ops.py",
    "workers/sampling/test_triton_sampler.py",
    "workers/test_no_synchronisation.py",
    SERVERS,
)
REHEARSED = ("workers/runner/test_memory_profiling.py",)  # it takes a second
MIN_LEFT_S = 20.0  # time left that is needed to start another file


def run(session: Session) -> None:
    require_modules(("pytest", "pytest_asyncio", "hypothesis", "httpx2"), "a package that the tests need")
    for name in FILES if session.on_gpu else REHEARSED:
        with session.row("tests", file=name) as row:
            path = ROOT / "tests" / name
            if not path.exists():
                raise SkippedError("the file does not exist")
            if name == SERVERS:
                require_modules(REQUIRED_BY_SERVER, "a package that the server needs")
            if session.left_s < MIN_LEFT_S:
                raise SkippedError("too little time was left")
            row["summary"] = _pytest(str(path), session.left_s - MIN_LEFT_S / 2)
            numbers = counts(row["summary"])
            row |= numbers
            if numbers.keys() == {"skipped_tests"}:
                raise SkippedError("all its tests are skipped on this machine")
            assert numbers and not numbers.get("failed_tests") and not numbers.get("errors"), row["summary"]


def _pytest(path: str, limit_s: float) -> str:
    """Run pytest on a file, print its output, and return its last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", path]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace"))
        return f"stopped after {limit_s:.0f} s"
    output = done.stdout.decode(errors="replace")
    print(output)
    return summary_line(output)


if __name__ == "__main__":
    run_stage(run)
