"""What workers/ has in C, compiled for the processor at hand when it is first needed, and kept.

torch has no operation that attends over pages on a CPU, and between the multiplications of a decoder layer it makes ten
passes where one does. Compiling takes three seconds, once, beside the import of torch. Without a compiler the worker
does without, and says so.
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
import threading
from pathlib import Path

log = logging.getLogger("servekit.worker")

FOLDER = Path(__file__).parent
SOURCES = ("paged_attention.c", "layers.c", "few_rows.c")
HEADERS = ("vectors.h",)
COMPILERS = ("cc", "gcc", "clang")
# Not -ffast-math: linked into a library, older GCCs let it change how the whole process rounds tiny numbers.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"),
)
MACROS: dict[str, tuple[str, ...]] = {"float32": (), "bfloat16": ("-DBFLOAT16",)}  # by dtype, without importing torch
COMPILE_TIMEOUT_S = 120

_compiling = threading.Lock()


@functools.cache
def c_library(dtype: str) -> ctypes.CDLL | None:
    """For tensors of this dtype on the CPU; None, and a line in the log, where it cannot be had."""
    if dtype not in MACROS:
        return None
    with _compiling:
        compiler = _find_compiler()
        if compiler is None:
            log.warning("there is no C compiler (%s): steps take about twice as long", ", ".join(COMPILERS))
            return None
        try:
            return _library(compiler, MACROS[dtype])
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or error
            log.warning("%s could not compile, so steps take about twice as long: %s", compiler, said)
            return None


def compile_ahead(dtype: str) -> None:
    """Begin now, if it was never compiled: a thread waits for the compiler while this one imports torch.

    It is not loaded before torch is, which brings the OpenMP library that both must share.
    """
    compiler, kept = _find_compiler(), _cache_folder()
    if dtype in MACROS and compiler is not None and kept is not None:
        threading.Thread(target=_compile_into, args=(kept, compiler, MACROS[dtype]), daemon=True).start()


def _compile_into(kept: Path, compiler: str, macros: tuple[str, ...]) -> None:
    with _compiling, contextlib.suppress(OSError, subprocess.SubprocessError):  # `c_library` tries again, and says so
        made = kept / _name(compiler, macros)
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=kept, prefix="compiling-") as folder:
                _compile(compiler, macros, Path(folder) / made.name).replace(made)


def _find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _library(compiler: str, macros: tuple[str, ...]) -> ctypes.CDLL:
    """From the cache, or made now. Raises OSError or SubprocessError."""
    name, kept = _name(compiler, macros), _cache_folder()
    if kept is not None and (kept / name).exists():
        with contextlib.suppress(OSError):  # it is damaged, and will be written over
            return ctypes.CDLL(str(kept / name))
    with tempfile.TemporaryDirectory(dir=kept, prefix="compiling-") as folder:
        made = _compile(compiler, macros, Path(folder) / name)
        library = ctypes.CDLL(str(made))  # which stays mapped, wherever the file goes
        if kept is not None:
            made.replace(kept / name)  # at once: somebody else may be compiling, too
        return library


def _name(compiler: str, macros: tuple[str, ...]) -> str:
    """Of the file; another one as soon as anything is different that it is made of."""
    texts = [(FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)]
    made_of = (*texts, *FLAGS, *macros, _processor(), compiler, str(os.stat(compiler).st_mtime_ns))
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:32] + ".so"


def _compile(compiler: str, macros: tuple[str, ...], made: Path) -> Path:
    """Raises OSError or SubprocessError."""
    command = [compiler, *FLAGS, *macros, *(str(FOLDER / source) for source in SOURCES), "-o", str(made), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    return made


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
