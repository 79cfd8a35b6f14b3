"""Decode attention on a CPU: the C of decode_attention.c, compiled for the processor at hand when it is first needed.

A decode step reads every key and value once and does next to nothing with them, so what it costs is how they are read.
Gathering pages reads them twice and writes them once more; there is no operation of torch that takes pages on a CPU.
Compiling takes half a second and is kept; without a C compiler, attention gathers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("servekit.worker")

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang")
# Not -ffast-math: linked into a library, older GCCs let it change how the whole process rounds tiny numbers.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"),
)
MACROS = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
COMPILE_TIMEOUT_S = 60
LANES = 16
MAX_HEAD_DIM = 512  # what a thread's stack holds of a row is num_heads times that


class _Layer(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class DecodeAttention:
    """Attention of rows of one query each, over pages of one dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend
        self._attend.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
        self._attend.restype = None

    def takes(self, queries: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Whether it can do these: one head size, in whole vectors."""
        head_dim = queries.shape[-1]
        return keys.shape == values.shape and head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        token_indices: Tensor,
        block_table: Tensor,
        positions: Tensor,
        output: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Write into `output` what the tokens at `token_indices` [B] see, which stand at `positions` [B].

        queries, output: [num_tokens, num_heads, head_dim]; keys, values: [num_blocks, block_size, num_kv_heads,
        head_dim]; block_table: [B, any].
        """
        assert queries.is_contiguous() and output.is_contiguous() and block_table.is_contiguous()
        _, block_size, num_kv_heads, head_dim = keys.shape
        wide_sinks = None if sinks is None else sinks.float().contiguous()
        layer = _Layer(
            *(queries.shape[1], num_kv_heads, head_dim, block_size, window or 0),
            *(None if wide_sinks is None else wide_sinks.data_ptr(), scale, softcap or 0.0),
        )
        num_rows, table_width = block_table.shape
        num_parts = min(num_kv_heads, -(-2 * torch.get_num_threads() // num_rows))  # so that no thread is without work
        pointers = (each.data_ptr() for each in (queries, keys, values, token_indices, block_table, positions))
        self._attend(ctypes.addressof(layer), *pointers, num_rows, table_width, num_parts, output.data_ptr())


@functools.cache
def decode_attention(dtype: torch.dtype) -> DecodeAttention | None:
    """For pages of this dtype on the CPU; None, and a line in the log, where it cannot be had."""
    if dtype not in MACROS:
        return None
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.warning(
            "there is no C compiler (%s): decode steps gather their pages, and are slower", ", ".join(COMPILERS)
        )
        return None
    try:
        return DecodeAttention(_library(compiler, MACROS[dtype]))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("decode steps gather their pages, and are slower: %s could not compile: %s", compiler, said)
        return None


def _library(compiler: str, macros: tuple[str, ...]) -> ctypes.CDLL:
    """From the cache, or made now. Raises OSError or SubprocessError."""
    made_of = (SOURCE.read_text(), *FLAGS, *macros, _processor(), compiler, str(os.stat(compiler).st_mtime_ns))
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:32] + ".so"
    kept = _cache_folder()
    if kept is not None and (kept / name).exists():
        return ctypes.CDLL(str(kept / name))
    with tempfile.TemporaryDirectory(dir=kept, prefix="compiling-") as folder:
        made = Path(folder) / name
        command = [compiler, *FLAGS, *macros, str(SOURCE), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        library = ctypes.CDLL(str(made))  # which stays mapped, wherever the file goes
        if kept is not None:
            made.replace(kept / name)  # at once: somebody else may be compiling, too
        return library


def _cache_folder() -> Path | None:
    """Where libraries are kept; None if there is no place where nobody else can have put one."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(OSError, RuntimeError):  # the latter for a user without a home
        folder = Path(base).expanduser() / "servekit"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        is_ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_ours and os.access(folder, os.W_OK):
            return folder
    return None


def _processor() -> str:
    """What -march=native stands for."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
