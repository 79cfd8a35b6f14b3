"""Claims about child processes: what limits they keep."""

from __future__ import annotations

import subprocess
import sys


def test_a_lower_limit_that_was_inherited_stays() -> None:
    code = (
        "import resource\n"
        "from servekit.protocol.child_process import limit_address_space\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "limit_address_space(2**32)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0])\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == f"{2**30}\n"
    )


def test_beyond_the_limit_of_the_address_space_an_allocation_fails() -> None:
    code = (
        "from servekit.protocol.child_process import limit_address_space\n"
        "limit_address_space(64 * 2**20)\n"
        "bytearray(32 * 2**20)\n"
        "try: bytearray(128 * 2**20)\n"
        "except MemoryError: print('refused')\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "refused\n"
    )
