"""Compile the C kernels for this processor at first use, and keep the libraries in the user's cache folder.

torch has no attention over pages on a CPU, and between the matrix products of a decoder layer it makes ten passes over
memory where one is enough. To compile takes some ten seconds, once per machine, beside the import of torch. Without a
compiler the worker uses torch's operations, and the log says so.
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
import time
from pathlib import Path

from workers.csrc.bindings import declare_prototypes

log = logging.getLogger("servekit.worker")

FOLDER = Path(__file__).parent
SOURCES = ("paged_attention.c", "layers.c", "skinny_gemm.c", "quantized_gemm.c", "decoder.c")
HEADERS = ("kernels.h", "kv_codes.h", "vectors.h", "strips.h", "tiles.h")
LANES = 16  # numbers in a vector, as in vectors.h: sizes are multiples of it, or padded to one
COMPILERS = ("cc", "gcc", "clang")
REQUIRED_COMPILER = "GCC 12 or newer, or Clang"  # older GCCs lack __builtin_shufflevector; vectors.h checks it, too
# Not -ffast-math: linked into a library, older GCCs let it change how the whole process rounds tiny numbers.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
)
MACROS: dict[str, tuple[str, ...]] = {"float32": (), "bfloat16": ("-DBFLOAT16",)}  # by dtype, without importing torch
COMPILE_TIMEOUT_S = 300  # seconds of work, which take minutes while other processes use the processor
# Each version of the sources has a library per dtype, of some 100 KB. Eight are four versions: enough to go back and
# forth between two checkouts without compiling.
MAX_CACHED_LIBRARIES = 8
STALE_AFTER_S = 3600  # a temporary folder this old belongs to a compilation that was killed
TEMPORARY_PREFIX = "compiling-"

_compiling = threading.Lock()


@functools.cache
def c_library(dtype: str) -> ctypes.CDLL | None:
    """Return the C kernels for CPU tensors of `dtype`, "float32" or "bfloat16".

    Returns None, and logs a warning, if they cannot be compiled; None without a warning for other dtypes.
    """
    if dtype not in MACROS:
        return None
    with _compiling:
        compiler = _find_compiler()
        if compiler is None:
            log.warning(
                "no C compiler found (tried %s), so steps take about twice as long; install %s",
                ", ".join(COMPILERS),
                REQUIRED_COMPILER,
            )
            return None
        try:
            return declare_prototypes(_load_or_compile(compiler, MACROS[dtype]))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning(
                "%s could not compile the C kernels, so steps take about twice as long; they need %s: %s",
                compiler,
                REQUIRED_COMPILER,
                getattr(error, "stderr", None) or error,
            )
            return None


def compile_ahead(dtype: str) -> None:
    """Compile the kernels for `dtype` in a background thread, if they are not in the cache, while torch is imported.

    The library is not loaded here. It must be loaded after torch, which brings the OpenMP library that both share.
    """
    compiler, cache_folder = _find_compiler(), _cache_folder()
    if dtype in MACROS and compiler is not None and cache_folder is not None:
        arguments = (cache_folder, compiler, MACROS[dtype])
        threading.Thread(target=_compile_into_cache, args=arguments, daemon=True).start()


def _compile_into_cache(cache_folder: Path, compiler: str, macros: tuple[str, ...]) -> None:
    # Errors are suppressed here because `c_library` compiles again and logs them.
    with _compiling, contextlib.suppress(OSError, subprocess.SubprocessError):
        target = cache_folder / _library_name(compiler, macros)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder, prefix=TEMPORARY_PREFIX) as folder:
                _compile(compiler, macros, Path(folder) / target.name).replace(target)
            _remove_old_libraries(cache_folder)


def _find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _load_or_compile(compiler: str, macros: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library from the cache, or compile it. Raises OSError or SubprocessError."""
    name, cache_folder = _library_name(compiler, macros), _cache_folder()
    if cache_folder is not None and (cache_folder / name).exists():
        with contextlib.suppress(OSError):  # a damaged file is compiled again and replaced
            library = ctypes.CDLL(str(cache_folder / name))
            os.utime(cache_folder / name)  # the modification time is the time of last use, see _remove_old_libraries
            return library
    with tempfile.TemporaryDirectory(dir=cache_folder, prefix=TEMPORARY_PREFIX) as folder:
        compiled = _compile(compiler, macros, Path(folder) / name)
        library = ctypes.CDLL(str(compiled))  # stays mapped when the file is moved or deleted
        if cache_folder is not None:
            compiled.replace(cache_folder / name)  # atomic, because other processes may compile the same library
            _remove_old_libraries(cache_folder)
        return library


def _remove_old_libraries(cache_folder: Path) -> None:
    """Keep the libraries that were used last. To delete one that a process has loaded is safe: it stays mapped."""
    used_s: dict[Path, float] = {}
    for path in cache_folder.iterdir():
        with contextlib.suppress(OSError):  # another process may have deleted it
            modified_s = path.stat().st_mtime
            if path.suffix == ".so":
                used_s[path] = modified_s
            elif path.name.startswith(TEMPORARY_PREFIX) and time.time() - modified_s > STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
    newest_first = sorted(used_s, key=used_s.__getitem__, reverse=True)
    for path in newest_first[MAX_CACHED_LIBRARIES:]:
        with contextlib.suppress(OSError):
            path.unlink()


def _library_name(compiler: str, macros: tuple[str, ...]) -> str:
    """Return a file name that changes with everything the library is made of: sources, flags, processor, compiler."""
    texts = [(FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)]
    inputs = (*texts, *FLAGS, *macros, _processor(), compiler, str(os.stat(compiler).st_mtime_ns))
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:32] + ".so"


def _compile(compiler: str, macros: tuple[str, ...], target: Path) -> Path:
    """Compile all sources into `target` and return it. Raises OSError or SubprocessError."""
    command = [compiler, *FLAGS, *macros, *(str(FOLDER / source) for source in SOURCES), "-o", str(target), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    return target


def _cache_folder() -> Path | None:
    """Return the folder that keeps the libraries; None if there is none that only this user can write to.

    A library that another user could have put there would run with this process's rights.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        folder = Path(base).expanduser() / "servekit"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        is_ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_ours and os.access(folder, os.W_OK):
            return folder
    return None


def _processor() -> str:
    """Return the processor's features, which decide what -march=native compiles to."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
