"""The tests that mean more on a GPU than in an interpreter, file by file, so that one that hangs hides no other."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.at_work import work
from benchmarks.gpu.reading import counts, summary_line
from benchmarks.gpu.session import ROOT, Session, SkippedError, environment, require_modules

FILES = ("test_triton_kernels.py", "test_no_synchronisation.py")
REHEARSED = ("test_kv_capacity.py",)  # it takes a second
LEAST_S = 20.0  # to begin another file with


def run(session: Session) -> None:
    require_modules(("pytest", "pytest_asyncio", "hypothesis", "httpx2"), "something that the tests need")
    for name in FILES if session.on_gpu else REHEARSED:
        with session.row("tests", file=name) as row:
            path = ROOT / "tests" / "workers" / name
            if not path.exists():
                raise SkippedError("there is no such file")
            if session.left_s < LEAST_S:
                raise SkippedError("no time was left")
            row["summary"] = _pytest(str(path), session.left_s - LEAST_S / 2)
            told = counts(row["summary"])
            row |= told
            if told.keys() == {"skipped_tests"}:
                raise SkippedError("every test in it skips itself here")
            assert told and not told.get("failed_tests") and not told.get("errors"), row["summary"]


def _pytest(path: str, limit_s: float) -> str:
    """Its last line. Everything else goes where this process's output goes."""
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
        return f"ended after {limit_s:.0f} s"
    output = done.stdout.decode(errors="replace")
    print(output)
    return summary_line(output)


if __name__ == "__main__":
    work(run)
