"""`python -m servekit.api.body_process`: decode large request bodies, one after the other.

The code is the server's own, and its time grows with the size of a body, which is limited. So the process is not killed
for a body that is slow; its memory is limited, as that of a sandbox process.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from servekit.api.schemas.packed_body import DecodeBody, PackedBody, Refusal, pack
from servekit.protocol.child_process import die_with_parent, ignore_signals, limit_address_space
from servekit.protocol.framing import MessageReceiver, MessageSender, adopt_reader, adopt_writer

NICENESS = 5  # if processors are busy, the model and small bodies go first
DESCRIPTION = "Decode large request bodies for the server."


def main(argv: Sequence[str] | None = None) -> int:
    """Read jobs from standard input and write packed bodies to standard output, until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m servekit.api.body_process", description=DESCRIPTION)
    parser.add_argument("--parent-pid", type=int, required=True, help="the server's process id; this exits with it")
    parser.add_argument("--memory-bytes", type=int, required=True, help="memory for bodies, beyond that of the start")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    os.nice(NICENESS)
    limit_address_space(arguments.memory_bytes)
    gc.disable()  # values from JSON have no cycles, and looking for them takes three times as long as decoding
    jobs = MessageReceiver[DecodeBody](adopt_reader(sys.stdin.fileno()), DecodeBody)
    results = MessageSender[PackedBody | Refusal](adopt_writer(sys.stdout.fileno()))
    while True:
        try:
            job = jobs.receive()
        except EOFError:
            return 0
        results.send(pack(job))


if __name__ == "__main__":
    sys.exit(main())
