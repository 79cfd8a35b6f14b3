"""A C compiler that optimizes little or nothing, for tests of which no claim depends on how fast the kernels are.

To optimize the kernels takes most of a minute of a processor.
"""

from __future__ import annotations

from pathlib import Path

from workers.csrc.build import find_compiler

# The kernels demand that their parts are inlined, once for each kind of weight and number of rows. Without the vectors
# of this processor, that is six megabytes of code. What a part computes does not depend on it.
NOT_INLINED = "-Dalways_inline=unused"


def quick_compiler(folder: Path) -> Path | None:
    """Write `cc` into this folder, and return its path; None without a C compiler."""
    compiler, script = find_compiler(), folder / "cc"
    if compiler is None:
        return None
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0 {NOT_INLINED}\n')
    script.chmod(0o755)
    return script
