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
    """A kernel, and all processes that it starts."""

    def __init__(self, kernel: KernelManager, client: BlockingKernelClient, mark: str) -> None:
        self.kernel = kernel
        self._client = client
        self._mark = mark

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

    def wait_until_alone(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.num_processes():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    mark = uuid.uuid4().hex
    folders = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")}
    environment = {**os.environ, **folders, "OMP_NUM_THREADS": "1", MARK: mark}
    kernel, client = start_new_kernel(env=environment, startup_timeout=TIMEOUT_S)
    try:
        yield Notebook(kernel, client, mark)
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
    assert notebook.output(BEGIN) == ""
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
    notebook.wait_until_alone()


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
    notebook.wait_until_alone()


@pytest.mark.long
def test_a_kernel_that_is_killed_takes_the_engine_with_it(notebook: Notebook) -> None:
    notebook.output(BEGIN)
    assert notebook.num_processes() > 0
    notebook.kernel.shutdown_kernel(now=True)
    notebook.wait_until_alone()
