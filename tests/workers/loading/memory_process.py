"""Measure what loading a model adds to the memory of a process, in a new process for each model.

Each line on standard input is a JSON object: {"small": PATH, "large": PATH, "quantization": null or a kind}. The answer
is a line {"held": BYTES, "peak": BYTES}: what the large model adds to a process that has loaded the small one, once it
is loaded, and at most. The small one is for what is imported, compiled and allocated once. This process imports all
modules and then forks, so a measurement takes the time of two loads.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - imported once, and not by each process

from workers.loading.model_manager import LoadedModel, ModelManager


def resident(kind: str) -> int:
    """Return a kind of this process's memory, in bytes: VmRSS is all, RssAnon is what is no file's."""
    found = re.search(kind + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def settle() -> None:
    """Return to the system what Python and the C library keep for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def load(path: str, quantization: str | None) -> LoadedModel:
    return ModelManager("cpu").load(Path(path), "bfloat16", None, quantization=quantization)


class Peak(threading.Thread):
    """Watches the memory of this process that is no file's."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.is_over = 0, False

    def run(self) -> None:
        while not self.is_over:
            self.largest = max(self.largest, resident("RssAnon"))
            time.sleep(0.001)


def measure(small: str, large: str, quantization: str | None) -> dict[str, int]:
    torch.set_num_threads(1)
    load(small, quantization)
    settle()
    before, anonymous = resident("VmRSS"), resident("RssAnon")
    peak = Peak()
    peak.start()
    loaded = load(large, quantization)
    peak.is_over = True
    peak.join()
    settle()
    measured = {"held": resident("VmRSS") - before, "peak": peak.largest - anonymous}
    del loaded  # until here it was in memory
    return measured


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            answer(measure(**json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            answer({"status": status})


def answer(measured: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(measured) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
