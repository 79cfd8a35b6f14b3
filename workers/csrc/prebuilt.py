"""C kernels that were compiled when the package was built, and which of them is the best for this processor.

A wheel of `make wheel` has a library for each variant and dtype in the folder `prebuilt` next to this file, so the
machine that installs it needs no compiler. A checkout has none.
"""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass
from pathlib import Path

PREBUILT_FOLDER = Path(__file__).parent / "prebuilt"
_V3 = frozenset(
    (
        *("abm", "avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "lahf_lm", "movbe", "pni", "popcnt"),
        *("sse4_1", "sse4_2", "ssse3", "xsave"),
    )
)
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BFLOAT16 = _V4 | {"avx512_vnni", "avx512_bf16", "avx512vbmi"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of processor that libraries are compiled for."""

    name: str
    machine: str  # as platform.machine() and compilers call it
    flags: tuple[str, ...]  # of the compiler
    features: frozenset[str] = frozenset()  # what the flags take for granted, as /proc/cpuinfo calls it

    def library_name(self, dtype: str) -> str:
        return f"{self.name}-{dtype}.so"


_BFLOAT16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi")
VARIANTS = (  # of each machine, the best one first; the last one needs nothing
    Variant(
        "amx",
        "x86_64",
        (*_BFLOAT16_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        _BFLOAT16 | {"amx_tile", "amx_int8", "amx_bf16"},
    ),
    Variant("avx512-bf16", "x86_64", _BFLOAT16_FLAGS, _BFLOAT16),
    Variant("avx512-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Variant("avx2", "x86_64", ("-march=x86-64-v3",), _V3),
    Variant("baseline", "x86_64", ("-march=x86-64",)),
    Variant("baseline", "aarch64", ("-march=armv8-a",)),
)


def find_prebuilt(dtype: str) -> Path | None:
    """Return the library for the best variant that this processor can run; None if the package has none."""
    if not PREBUILT_FOLDER.exists():
        return None
    features = set(processor_features().split())
    for variant in VARIANTS:
        library = PREBUILT_FOLDER / variant.library_name(dtype)
        if variant.machine == platform.machine() and variant.features <= features and library.exists():
            return library
    return None


def processor_features() -> str:
    """Return the line of /proc/cpuinfo with the processor's features, which also decide what -march=native means."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
