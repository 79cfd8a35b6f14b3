"""What workers/ has in C, compiled for the processor at hand when it is first needed, and kept.

torch has no operation that attends over pages on a CPU, and between the multiplications of a decoder layer it makes ten
passes where one does. Compiling takes two seconds, once; without a C compiler the worker does without, and says so.
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

log = logging.getLogger("servekit.worker")

FOLDER = Path(__file__).parent
SOURCES = ("paged_attention.c", "layers.c")
HEADERS = ("vectors.h",)
COMPILERS = ("cc", "gcc", "clang")
# Not -ffast-math: linked into a library, older GCCs let it change how the whole process rounds tiny numbers.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"),
)
MACROS = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
COMPILE_TIMEOUT_S = 120


@functools.cache
def c_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """For tensors of this dtype on the CPU; None, and a line in the log, where it cannot be had."""
    if dtype not in MACROS:
        return None
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.warning("there is no C compiler (%s): steps take about twice as long", ", ".join(COMPILERS))
        return None
    try:
        return _library(compiler, MACROS[dtype])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("%s could not compile, so steps take about twice as long: %s", compiler, said)
        return None


def _library(compiler: str, macros: tuple[str, ...]) -> ctypes.CDLL:
    """From the cache, or made now. Raises OSError or SubprocessError."""
    texts = [(FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)]
    made_of = (*texts, *FLAGS, *macros, _processor(), compiler, str(os.stat(compiler).st_mtime_ns))
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:32] + ".so"
    kept = _cache_folder()
    if kept is not None and (kept / name).exists():
        return ctypes.CDLL(str(kept / name))
    with tempfile.TemporaryDirectory(dir=kept, prefix="compiling-") as folder:
        made = Path(folder) / name
        sources = [str(FOLDER / source) for source in SOURCES]
        command = [compiler, *FLAGS, *macros, *sources, "-o", str(made), "-lm"]
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
