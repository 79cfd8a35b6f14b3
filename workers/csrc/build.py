"""Load the C kernels for this processor: those that the package has prebuilt, or else compile them at first use.

torch has no attention over pages on a CPU, and between the matrix products of a decoder layer it makes ten passes over
memory where one is enough. To compile takes some ten seconds, once per machine, in addition to importing torch; the
libraries are kept in the user's cache folder. Without a compiler the worker uses torch's operations. The log says which
of the three it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from workers.csrc.bindings import declare_prototypes
from workers.csrc.prebuilt import find_prebuilt, processor_features

log = logging.getLogger("servekit.worker")

FOLDER = Path(__file__).parent
SOURCES = (
    *("paged_attention.c", "tiled_attention.c", "layers.c", "skinny_gemm.c", "blocked_gemm.c", "quantized_gemm.c"),
    *("lora.c", "experts.c", "decoder.c", "language_model.c", "compact_panels.c", "team.c"),
)
HEADERS = (
    *("kernels.h", "kv_codes.h", "vectors.h", "products.h", "strips.h", "team.h", "tiles.h"),
    *("compact_panels.h", "online_softmax.h", "query_group.h"),
)
LANES = 16  # numbers in a vector, as in vectors.h: sizes are multiples of it, or padded to one
COMPILERS = ("cc", "gcc", "clang")
REQUIRED_COMPILER = "GCC 12 or newer, or Clang"  # older GCCs lack __builtin_shufflevector; vectors.h checks it, too
# Not -ffast-math: linked into a library, older GCCs let it change how the whole process rounds tiny numbers.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
)
THIS_PROCESSOR = ("-march=native",)
MACROS: dict[str, tuple[str, ...]] = {"float32": (), "bfloat16": ("-DBFLOAT16",)}  # by dtype, without importing torch
COMPILE_TIMEOUT_S = 300  # seconds of work, which take minutes while other processes use the processor
LOCK_POLL_S = 0.05  # while another process compiles
# Each version of the sources has a library per dtype, of some 100 KB. Eight are four versions: enough to go back and
# forth between two checkouts without compiling.
MAX_CACHED_LIBRARIES = 8
STALE_AFTER_S = 3600  # a temporary folder this old belongs to a compilation that was killed
TEMPORARY_PREFIX = "compiling-"

_compiling = threading.Lock()


@functools.cache
def c_library(dtype: str) -> ctypes.CDLL | None:
    """Return the C kernels for CPU tensors of `dtype`, "float32" or "bfloat16".

    Returns None, and logs a warning, if there are none and they cannot be compiled; None without a warning for other
    dtypes.
    """
    if dtype not in MACROS:
        return None
    with _compiling:
        library = _load_prebuilt(dtype) or _load_or_compile(dtype)
    return None if library is None else declare_prototypes(library)


def compile_ahead(dtype: str) -> None:
    """Compile the kernels for `dtype` in a background thread, if there are none yet, while torch is imported.

    The library is not loaded here. It must be loaded after torch, which brings the OpenMP library that both share.
    """
    compiler, cache_folder = find_compiler(), _cache_folder()
    if dtype in MACROS and compiler is not None and cache_folder is not None and find_prebuilt(dtype) is None:
        arguments = (cache_folder, compiler, MACROS[dtype])
        threading.Thread(target=_compile_into_cache, args=arguments, daemon=True).start()


def _compile_into_cache(cache_folder: Path, compiler: str, macros: tuple[str, ...]) -> None:
    # Errors are suppressed here because `c_library` compiles again and logs them.
    with _compiling, contextlib.suppress(OSError, subprocess.SubprocessError), _no_other_process(cache_folder):
        target = cache_folder / _library_name(compiler, macros)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder, prefix=TEMPORARY_PREFIX) as folder:
                _compile(compiler, macros, Path(folder) / target.name).replace(target)
            _remove_old_libraries(cache_folder)


def find_compiler() -> str | None:
    """Return the path of a C compiler."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _load_prebuilt(dtype: str) -> ctypes.CDLL | None:
    path = find_prebuilt(dtype)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # it was built for a newer libc, for example
        log.warning("the prebuilt C kernels cannot be loaded, so they are compiled: %s", error)
        return None
    log.info("C kernels: prebuilt, %s", path.stem)
    return library


def _load_or_compile(dtype: str) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        log.warning(
            "no C compiler found (tried %s), so steps take about twice as long; install %s",
            ", ".join(COMPILERS),
            REQUIRED_COMPILER,
        )
        return None
    try:
        library = _load_cached_or_compile(compiler, MACROS[dtype])
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "%s could not compile the C kernels, so steps take about twice as long; they need %s: %s",
            compiler,
            REQUIRED_COMPILER,
            getattr(error, "stderr", None) or error,
        )
        return None
    log.info("C kernels: compiled by %s for this processor, %s", compiler, dtype)
    return library


def _load_cached_or_compile(compiler: str, macros: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library from the cache, or compile it. Raises OSError or SubprocessError."""
    name, cache_folder = _library_name(compiler, macros), _cache_folder()
    if cache_folder is None:
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as folder:
            return ctypes.CDLL(str(_compile(compiler, macros, Path(folder) / name)))
    library = _load_cached(cache_folder / name)
    if library is not None:
        return library
    with _no_other_process(cache_folder):
        library = _load_cached(cache_folder / name)
        if library is not None:
            return library
        with tempfile.TemporaryDirectory(dir=cache_folder, prefix=TEMPORARY_PREFIX) as folder:
            compiled = _compile(compiler, macros, Path(folder) / name)
            library = ctypes.CDLL(str(compiled))  # stays mapped when the file is moved or deleted
            compiled.replace(cache_folder / name)  # atomic, because other processes may look for it
            _remove_old_libraries(cache_folder)
            return library


def _load_cached(path: Path) -> ctypes.CDLL | None:
    if path.exists():
        with contextlib.suppress(OSError):  # a damaged file is compiled again and replaced
            library = ctypes.CDLL(str(path))
            os.utime(path)  # the modification time is the time of last use, see _remove_old_libraries
            return library
    return None


@contextlib.contextmanager
def _no_other_process(cache_folder: Path, timeout_s: float = COMPILE_TIMEOUT_S) -> Iterator[None]:
    """Lock the cache folder. If several workers start, one of them compiles, and the others wait for its library.

    Otherwise all of them would compile the same, on the same cores. The lock ends with the process that has it. This
    process compiles without it if it cannot have it in time, or if the file system has no locks.
    """
    deadline_s = time.monotonic() + timeout_s
    descriptor = os.open(cache_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


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
    inputs = (*texts, *FLAGS, *macros, processor_features(), compiler, str(os.stat(compiler).st_mtime_ns))
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:32] + ".so"


def _compile(compiler: str, macros: tuple[str, ...], target: Path) -> Path:
    return compile_library(compiler, (*THIS_PROCESSOR, *macros), target)


def compile_library(
    compiler: str, flags: Sequence[str], target: Path, timeout_s: float | None = COMPILE_TIMEOUT_S
) -> Path:
    """Compile all sources into `target` and return it; object files are left next to it.

    Raises OSError or SubprocessError.
    """
    objects = {source: str(target.with_name(f"{Path(source).stem}.o")) for source in SOURCES}
    _run_side_by_side(
        ([compiler, *flags, *FLAGS, "-c", str(FOLDER / source), "-o", path] for source, path in objects.items()),
        timeout_s,
    )
    linking = [compiler, *flags, "-shared", "-fopenmp", *objects.values(), "-o", str(target), "-lm"]
    _run_side_by_side([linking], timeout_s)
    return target


def _run_side_by_side(commands: Iterable[list[str]], timeout_s: float | None) -> None:
    """Run commands at the same time; if one fails, end the others, and raise its CalledProcessError.

    Not in threads of a pool, because a process that ends waits for those.
    """
    ends_s = None if timeout_s is None else time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)  # waits for it
            stack.callback(process.terminate)  # before that; does nothing if it has ended
            running.append(process)
        for process in running:
            left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
            _, errors = process.communicate(timeout=left_s)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)


def _cache_folder() -> Path | None:
    """Return the folder that keeps the libraries; None if there is none that only this user can write to.

    A library that another user could have put there would run with this process's privileges.
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
