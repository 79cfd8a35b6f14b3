"""A C compiler that does not optimize, for tests of which no claim depends on how fast the kernels are.

To optimize the kernels takes most of a minute of a processor.
"""

from __future__ import annotations

from pathlib import Path

from workers.csrc.build import find_compiler


def quick_compiler(folder: Path) -> Path | None:
    """Write `cc` into this folder, and return its path; None without a C compiler."""
    compiler, script = find_compiler(), folder / "cc"
    if compiler is None:
        return None
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    script.chmod(0o755)
    return script
