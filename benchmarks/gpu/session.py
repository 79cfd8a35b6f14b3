"""The context of a stage: its device, its shapes, its time, and its recorder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.records import Record, Recorder
from benchmarks.gpu.requirements import installation_hint
from benchmarks.gpu.shapes import Ceilings, Shape
from benchmarks.gpu.timing import measure_ceilings
from servekit.protocol.messages import LoadModel
from workers.device.memory import release_memory
from workers.loading.model_manager import LoadedModel, ModelManager

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 16
CONTEXT = 1024
MIN_BLOCKS = 2048  # one whole context: the captured graphs depend on the longest possible sequence
PACKAGES = ("torch", "triton", "transformers", "flash-attn", "vllm")


class SkippedError(Exception):
    """It cannot be measured here; the message says why, and what would help."""


class Session:
    """One stage's context. A row that fails is recorded as failed, and the stage goes on."""

    def __init__(self, recorder: Recorder, device: str, shapes: list[Shape], limit_s: float, command: str) -> None:
        self.device = torch.device(device)
        self.shapes = shapes
        self.num_failed = 0
        self._recorder = recorder
        self._deadline = time.monotonic() + limit_s
        if not recorder.of_this_run("machine"):
            recorder.write("machine", describe_machine(self.device, command))

    @property
    def on_gpu(self) -> bool:
        """False in a rehearsal, which runs the same code as far as a CPU can; its figures mean nothing."""
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def batches(self) -> list[int]:
        return [1, 32, 128, 256] if self.on_gpu else [1, 4]

    @property
    def context(self) -> int:
        """The tokens that each sequence has before its steps are timed."""
        return CONTEXT if self.on_gpu else 64

    @contextmanager
    def row(self, table: str, **fields: Any) -> Iterator[Record]:
        """Yield a record to fill in; it is written when the block ends, also by an exception."""
        record: Record = dict(fields)
        try:
            yield record
        except SkippedError as error:
            record["skipped"] = str(error)
        except Exception as error:
            traceback.print_exc()
            self.num_failed += 1
            record["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            self._recorder.write(table, record)
            print(f"  {table}: {record}", flush=True)

    def write(self, table: str, **fields: Any) -> None:
        with self.row(table, **fields):
            pass

    def ceilings(self) -> Ceilings:
        """Return this device's ceilings, which are measured once in a run."""
        known = self._recorder.of_this_run("ceilings")
        if not known:
            self.write("ceilings", **measure_ceilings(self.device))
            known = self._recorder.of_this_run("ceilings")
        return Ceilings(known[-1]["bytes_per_s"], known[-1]["flops"])

    @contextmanager
    def model_folder(self, shape: Shape) -> Iterator[Path]:
        """Make a model directory without weights."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
            yield Path(folder)

    def load(self, shape: Shape) -> LoadedModel:
        """Load the shape in bfloat16, with random weights made on the device."""
        release_memory()
        with self.model_folder(shape) as folder:
            return ModelManager(str(self.device)).load(folder, "bfloat16", None, load_format="dummy")

    def settings(self, num_sequences: int, num_tokens: int, **others: Any) -> LoadModel:
        """Return settings with KV blocks for at least num_tokens of each sequence."""
        fields: dict[str, Any] = {
            "model_path": "",
            "device": str(self.device),
            "dtype": "bfloat16",
            "max_model_len": None,
            "max_num_seqs": num_sequences,
            "max_num_batched_tokens": 8192,
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": max(num_sequences * -(-num_tokens // BLOCK_SIZE), MIN_BLOCKS if self.on_gpu else 0),
            "kv_cache_memory_bytes": None,
            "gpu_memory_utilization": 0.9,
        }
        return LoadModel(**{**fields, **others})


def require_modules(names: Iterable[str], purpose: str) -> None:
    """Raise SkippedError with what to install if a module is missing."""
    missing = installation_hint(names)
    if missing:
        raise SkippedError(f"{purpose} is missing: {missing}")


def environment() -> dict[str, str]:
    """Return an environment in which child processes import this checkout, whether or not servekit is installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def describe_machine(device: torch.device, command: str) -> Record:
    is_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if is_gpu else None
    return {
        "device": properties.name if properties else f"{platform.machine()} CPU (a rehearsal)",
        "memory_bytes": properties.total_memory if properties else 0,
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "command": command,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit; empty if this is not a checkout, where git would find another repository further up."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
