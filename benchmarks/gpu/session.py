"""What a stage is given: the device, the shapes, and somewhere to write."""

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

from benchmarks.gpu.measuring import measure_ceilings
from benchmarks.gpu.needed import what_to_install
from benchmarks.gpu.records import Record, Recorder
from benchmarks.gpu.shapes import Ceilings, Shape
from servekit.messages import LoadModel
from workers.model_manager import LoadedModel, ModelManager
from workers.pieces import release_memory

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 16
CONTEXT = 1024
LEAST_BLOCKS = 2048  # one whole context: what a graph is made for depends on how long a sequence may become
PACKAGES = ("torch", "triton", "transformers", "flash-attn", "vllm")


class SkippedError(Exception):
    """It cannot be measured here; says why, and what would help."""


class Session:
    """One stage's. A row that fails is told in its table, and the next one is tried."""

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
        """Otherwise this is a rehearsal: it goes the same way as far as a CPU can, and its figures mean nothing."""
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def batches(self) -> list[int]:
        return [1, 32, 128, 256] if self.on_gpu else [1, 4]

    @property
    def context(self) -> int:
        """Tokens that each sequence has before its steps are timed."""
        return CONTEXT if self.on_gpu else 64

    @contextmanager
    def row(self, table: str, **fields: Any) -> Iterator[Record]:
        """Figures to be filled in; written when the block ends, however it ends."""
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
        """Of this device; measured once in a run."""
        known = self._recorder.of_this_run("ceilings")
        if not known:
            self.write("ceilings", **measure_ceilings(self.device))
            known = self._recorder.of_this_run("ceilings")
        return Ceilings(known[-1]["bytes_per_s"], known[-1]["flops"])

    @contextmanager
    def model_folder(self, shape: Shape) -> Iterator[Path]:
        """A model's directory without weights."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
            yield Path(folder)

    def load(self, shape: Shape) -> LoadedModel:
        """In bfloat16, with weights that are made up on the device."""
        release_memory()
        with self.model_folder(shape) as folder:
            return ModelManager(str(self.device)).load(folder, "bfloat16", None, load_format="dummy")

    def settings(self, num_sequences: int, num_tokens: int, **others: Any) -> LoadModel:
        """With blocks for so many tokens of each sequence, at least."""
        fields: dict[str, Any] = {
            "model_path": "",
            "device": str(self.device),
            "dtype": "bfloat16",
            "max_model_len": None,
            "max_num_seqs": num_sequences,
            "max_num_batched_tokens": 8192,
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": max(num_sequences * -(-num_tokens // BLOCK_SIZE), LEAST_BLOCKS if self.on_gpu else 0),
            "kv_cache_memory_bytes": None,
            "gpu_memory_utilization": 0.9,
        }
        return LoadModel(**{**fields, **others})


def require_modules(names: Iterable[str], of_what: str) -> None:
    """Raises SkippedError with what to install."""
    missing = what_to_install(names)
    if missing:
        raise SkippedError(f"{of_what} is missing: {missing}")


def environment() -> dict[str, str]:
    """Of a process that is to find this checkout wherever its own children start, be servekit installed or not."""
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
    """Empty where this is no checkout: git would find somebody else's further up."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""
