"""`servekit.LLM` in programs that end in all kinds of ways: no process, no port and no file is left.

The device is simulated. Each program has an empty folder for temporary files. All processes that it
starts inherit a variable, by which they are found in /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.support import proc
from tests.support.default_signals import heed_signals

TIMEOUT_S = 120
MARK = "TEST_OF_EMBEDDED"
BEGIN = """
import asyncio, os, signal, sys, threading, time
from servekit import LLM, AsyncLLM, SamplingParams
SHORT = SamplingParams(max_tokens=4)
PROMPTS = [f"prompt {number}" for number in range(1000)]

def say(*words):
    print(*words, flush=True)
"""


class Program:
    """A Python program, and all processes that it starts."""

    def __init__(self, folder: Path, text: str) -> None:
        self._mark = uuid.uuid4().hex
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        file = folder / "program.py"
        file.write_text(BEGIN + text)
        environment = {**os.environ, MARK: self._mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, str(file)],
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=environment,
            cwd=folder,
            preexec_fn=heed_signals,
        )

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        """Wait for the end, check that nothing is left, and return (exit code, output, errors)."""
        try:
            output, errors = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its workers end with it; otherwise they take the time of all later tests
            raise
        self.check_nothing_is_left()
        return self.process.returncode, output, errors

    def pids(self) -> list[int]:
        """Return all living processes of the program."""
        return proc.with_variable(MARK, self._mark)

    def check_nothing_is_left(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while pids := self.pids():  # the kernel kills them one after the other
            assert time.monotonic() < deadline_s, [proc.read(pid, "cmdline") for pid in pids]
            time.sleep(0.01)
        assert list(self.temporary.iterdir()) == []


def test_a_thousand_prompts_in_a_with_block(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
with LLM("sim:instant") as llm:
    outputs = llm.generate(PROMPTS, SHORT)
    say(len(outputs), all(len(output.outputs[0].text) == 4 for output in outputs))
say("closed", threading.active_count())
""",
    )
    code, output, errors = program.end()
    assert (code, output.split("\n")[:3]) == (0, ["1000 True", "closed 1", ""]), errors
    assert "child process" not in errors, "asyncio warns of processes whose exit code something else has taken"


@pytest.mark.long
def test_it_opens_no_port_and_starts_processes_that_end_with_it(tmp_path: Path) -> None:
    program = Program(tmp_path, 'llm = LLM("sim:instant")\nsay("ready")\ntime.sleep(600)\n')
    assert program.read_line() == "ready"
    assert len(program.pids()) >= 2
    assert not any(map(proc.listening_sockets, program.pids()))
    program.process.terminate()  # without a handler, the kernel ends the program at once
    assert program.end()[0] == -signal.SIGTERM


@pytest.mark.long
def test_an_exception_in_the_with_block_goes_on(tmp_path: Path) -> None:
    program = Program(
        tmp_path, 'with LLM("sim:instant") as llm:\n    llm.generate(PROMPTS, SHORT)\n    raise ValueError("mine")\n'
    )
    code, _, errors = program.end()
    assert code == 1 and errors.rstrip().endswith("ValueError: mine")


def test_a_program_that_never_closes_ends_clean(tmp_path: Path) -> None:
    program = Program(tmp_path, 'llm = LLM("sim:instant")\nsay(len(llm.generate(PROMPTS, SHORT)))\n')
    code, output, errors = program.end()
    assert (code, output) == (0, "1000\n"), errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_an_engine_that_nothing_refers_to_ends(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
for _ in range(3):
    llm = LLM("sim:instant")
    llm.generate("a prompt", SHORT)
del llm
say(threading.active_count())
""",
    )
    code, output, errors = program.end()
    assert (code, output) == (0, "1\n"), errors


def test_ctrl_c_ends_the_call_and_the_engine_goes_on(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
with LLM("sim:step=1ms") as llm:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        llm.generate(PROMPTS, SamplingParams(max_tokens=30_000))
    except KeyboardInterrupt:
        say("interrupted")
    say(len(llm.generate(PROMPTS[:10], SHORT)))
""",
    )
    code, output, errors = program.end()
    assert (code, output.split()) == (0, ["interrupted", "10"]), errors


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("where", ["load", "generate"])
def test_a_signal_that_ends_the_program_ends_its_workers(tmp_path: Path, number: signal.Signals, where: str) -> None:
    program = Program(
        tmp_path,
        f"""
if {where == "load"}:
    say("begun")
llm = LLM("sim:load=30s" if {where == "load"} else "sim:step=1ms")
say("begun")
llm.generate(PROMPTS, SamplingParams(max_tokens=30_000))
""",
    )
    assert program.read_line() == "begun"
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(program.pids()) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    program.process.send_signal(number)
    code, _, errors = program.end()
    assert code == -number, errors


@pytest.mark.long
def test_a_forked_process_leaves_the_engine_to_its_parent(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
from servekit.errors import WorkerNotReady
CHAT = [{"role": "user", "content": "Hello"}]
with LLM("sim:instant") as llm:
    before = llm.chat(CHAT, SHORT)[0].outputs[0].text
    pid = os.fork()
    if pid == 0:
        try:
            llm.generate("a prompt", SHORT)
        except WorkerNotReady as error:
            say("child:", "forked from it" in error.message)
        llm.close()
        sys.exit(7)  # with the cleanup code of Python, and of the with block
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=llm.close)
    child.start()
    child.join()
    say(child.exitcode, llm.chat(CHAT, SHORT)[0].outputs[0].text == before, len(llm.generate(PROMPTS, SHORT)))
""",
    )
    code, output, errors = program.end()
    assert (code, output.splitlines()) == (0, ["child: True", "7", "0 True 1000"]), errors


@pytest.mark.long
def test_workers_do_not_import_the_main_module(tmp_path: Path) -> None:
    """There is no `if __name__ == "__main__"`, and the start method is that of macOS and of Python on Windows."""
    program = Program(
        tmp_path,
        """
import multiprocessing
multiprocessing.set_start_method("spawn")
with open("imports", "a") as file:
    file.write("x")
llm = LLM("sim:instant", data_parallel_size=2)
say(len(llm.generate(PROMPTS, SHORT)))
""",
    )
    code, output, errors = program.end()
    assert (code, output) == (0, "1000\n"), errors
    assert (tmp_path / "imports").read_text() == "x"


@pytest.mark.long
def test_it_works_where_an_event_loop_runs_already(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
async def cell():
    llm = LLM("sim:instant")
    say(len(llm.generate(PROMPTS, SHORT)))
    async with AsyncLLM("sim:instant") as other:
        say([output.finished async for output in other.generate("a", SHORT, stream=False)])
    llm.close()
asyncio.run(cell())
""",
    )
    code, output, errors = program.end()
    assert (code, output) == (0, "1000\n[True]\n"), errors


@pytest.mark.long
def test_an_async_engine_that_is_never_closed_ends_with_the_program(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
async def main():
    llm = AsyncLLM("sim:instant")
    await llm.start()
    say([output.finished async for output in llm.generate("a", SHORT, stream=False)])
asyncio.run(main())
""",
    )
    code, output, _ = program.end()
    assert (code, output) == (0, "[True]\n")


@pytest.mark.long
def test_twenty_thousand_prompts_take_no_more_memory_on_their_way(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
import resource
def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with LLM("sim:instant") as llm:
    llm.generate(PROMPTS * 5, SamplingParams(max_tokens=1))
    before = peak_mib()
    outputs = llm.generate(PROMPTS * 20, SamplingParams(max_tokens=1))
    say(len(outputs), int((peak_mib() - before) * 2**20 / len(outputs)))
""",
    )
    code, output, errors = program.end()
    assert code == 0, errors
    num_outputs, bytes_each = map(int, output.split())
    assert num_outputs == 20_000
    assert bytes_each < 4096  # the output itself
