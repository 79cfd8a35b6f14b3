"""The C kernel of attention for a processor with AMX. Its tiles are emulated, for machines without AMX."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.quick_compiler import NOT_INLINED
from workers.csrc import build
from workers.csrc.bindings import declare_prototypes

TILES = ("-mamx-tile", "-mamx-int8", "-mamx-bf16", f"-I{build.FOLDER}")
FOLDER = Path(__file__).parents[1] / "workers" / "attention"


@functools.cache
def emulated_attention(*macros: str) -> ctypes.CDLL:
    """Return a library for bfloat16 with attention alone, and with tiles in plain C. It is compiled in a second."""
    return _compile(("emulated_tiled_attention.c",), "-O1", NOT_INLINED, *macros)


@functools.cache
def trapped_attention() -> ctypes.CDLL:
    """Return such a library with the instructions of AMX, compiled as for workers. Each instruction is emulated."""
    trap = str(Path(__file__).with_name("trapped_tiles.c"))
    library = _compile(("trapped_tiled_attention.c", trap))
    library.trap_tiles()
    return library


def _compile(sources: tuple[str, ...], *flags: str) -> ctypes.CDLL:
    """Compile paged_attention.c with these sources, and load the library. Skips the test without such a compiler."""
    compiler = build.find_compiler()
    if compiler is None or platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("AMX is an extension of x86-64 processors, which needs Linux and a compiler that knows it")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(build, "SOURCES", ("paged_attention.c", *(str(FOLDER / source) for source in sources)))
        patch.setattr(build, "FLAGS", (*build.FLAGS, *TILES, *flags))
        target = Path(folder) / "attention.so"
        build.compile_library(compiler, (*build.THIS_PROCESSOR, *build.MACROS["bfloat16"]), target)
        return declare_prototypes(ctypes.CDLL(str(target)))
