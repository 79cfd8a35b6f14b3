"""`servekit.LLM` in a Jupyter kernel, whose cells run on an event loop."""

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.support import proc

TIMEOUT_S = 120
MARK = "TEST_OF_NOTEBOOKS"


class Notebook:
    """A kernel, all processes that it starts, and its folder for temporary files."""

    def __init__(self, kernel: KernelManager, client: BlockingKernelClient, mark: str, temporary: Path) -> None:
        self.kernel = kernel
        self._client = client
        self._mark = mark
        self._temporary = temporary

    def output(self, code: str) -> str:
        """Run a cell, and return what it wrote, with the name of its error."""
        texts: list[str] = []

        def read(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                texts.append(content["text"])
            elif kind == "error":
                texts.append(content["ename"])

        self._client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=read)
        return "".join(texts)

    def num_processes(self) -> int:
        """Return how many processes the kernel has started that are alive."""
        return len(proc.with_variable(MARK, self._mark)) - self.kernel.is_alive()

    def listening(self) -> set[str]:
        """Return the sockets on which the kernel, or a process that it has started, waits for connections."""
        return {each for pid in proc.with_variable(MARK, self._mark) for each in proc.listening_sockets(pid)}

    def check_nothing_is_left(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.num_processes():  # the kernel kills them one after the other
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert list(self._temporary.iterdir()) == []


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    mark, temporary = uuid.uuid4().hex, tmp_path / "temporary"
    temporary.mkdir()
    folders = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")}
    environment = {**os.environ, **folders, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", MARK: mark}
    kernel, client = start_new_kernel(env=environment, startup_timeout=TIMEOUT_S)
    try:
        yield Notebook(kernel, client, mark, temporary)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


BEGIN = """
from servekit import LLM, AsyncLLM, SamplingParams
llm = LLM("sim:step=1ms")
prompts = [f"prompt {number}" for number in range(1000)]
"""


@pytest.mark.long
def test_cells_use_an_engine_until_they_delete_it(notebook: Notebook) -> None:
    own_sockets = notebook.listening()
    assert notebook.output(BEGIN) == ""
    assert notebook.listening() == own_sockets, "an engine opens no port"
    assert notebook.output("print(len(llm.generate(prompts, SamplingParams(max_tokens=4))))") == "1000\n"
    assert notebook.num_processes() > 0
    assert notebook.output("1 / 0") == "ZeroDivisionError"
    streamed = """
async with AsyncLLM("sim:step=1ms") as other:
    async for output in other.generate("a prompt", SamplingParams(max_tokens=4)):
        pass
print(output.outputs[0].text == llm.generate("a prompt", SamplingParams(max_tokens=4))[0].outputs[0].text)
"""
    assert notebook.output(streamed) == "True\n"
    assert notebook.output("del llm") == ""
    notebook.check_nothing_is_left()


@pytest.mark.long
def test_an_exception_in_a_with_block_of_a_cell_closes_the_engine(notebook: Notebook) -> None:
    code = 'with LLM("sim:instant") as other:\n    other.generate(prompts, SamplingParams(max_tokens=4))\n    1 / 0'
    assert notebook.output(BEGIN + "del llm\n" + code) == "ZeroDivisionError"
    notebook.check_nothing_is_left()


@pytest.mark.long
def test_processes_that_a_cell_forks_or_spawns_leave_the_engine_to_it(notebook: Notebook) -> None:
    notebook.output(BEGIN)
    code = """
import multiprocessing, os, sys
from servekit.errors import WorkerNotReady

def use_the_engine():
    try:
        llm.generate("a prompt")
    except WorkerNotReady:
        llm.close()
        sys.exit(7)

forked = multiprocessing.get_context("fork").Process(target=use_the_engine)
spawned = multiprocessing.get_context("spawn").Process(target=os.getpid)
for process in (forked, spawned):
    process.start()
    process.join(60)
print(forked.exitcode, spawned.exitcode, len(llm.generate(prompts, SamplingParams(max_tokens=4))))
"""
    assert notebook.output(code) == "7 0 1000\n"
    assert notebook.output("spawned.close(); forked.close(); llm.close()") == ""
    # What Python's own multiprocessing has started for `spawn`, its resource tracker, ends with the kernel.
    notebook.kernel.shutdown_kernel()
    notebook.check_nothing_is_left()


@pytest.mark.long
def test_interrupt_ends_a_cell_and_shutdown_ends_the_engine(notebook: Notebook) -> None:
    notebook.output(BEGIN)
    loop = """
import os, signal, threading
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # as Jupyter's button does
llm.generate(prompts, SamplingParams(max_tokens=30_000))
"""
    assert notebook.output(loop) == "KeyboardInterrupt"
    assert notebook.output("print(len(llm.generate(prompts[:5], SamplingParams(max_tokens=4))))") == "5\n"
    notebook.kernel.shutdown_kernel()
    notebook.check_nothing_is_left()


@pytest.mark.long
def test_a_kernel_that_is_killed_takes_the_engine_with_it(notebook: Notebook) -> None:
    notebook.output(BEGIN)
    assert notebook.num_processes() > 0
    notebook.kernel.shutdown_kernel(now=True)
    notebook.check_nothing_is_left()
