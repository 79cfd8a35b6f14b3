"""A process that stands in for the one that places workers on a cluster: it starts them on this machine.

Its environment variable FAKE_PLACER makes it fail: `refuse` reports a failure, `crash` ends it at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from servekit.protocol.placement_job import PlacementFailed, PlacementJob, SetNumWorkers


def main() -> int:
    """Start workers as asked until standard input ends."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlacementJob)
    match os.environ.get("FAKE_PLACER"):
        case "refuse":
            noise = b"noise\n" + 200_000 * b"x" + b"\n"  # asyncio reads lines of up to 64 KiB
            sys.stdout.buffer.write(noise + msgspec.json.encode(PlacementFailed("there is no cluster")) + b"\n")
            return 2
        case "crash":
            return 3
        case _:
            pass
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.touch(mode=0o600)
        key.write_text(job.key)
        command = [sys.executable, "-m", "servekit.worker", "--connect", job.listen_address, "--key-file", str(key)]
        command += ["--model", job.model, "--device", job.device, "--node", "a node of the cluster"]
        command += ["--parent-pid", str(os.getpid())]
        workers = [subprocess.Popen(command) for _ in range(job.num_workers)]
        for line in sys.stdin.buffer:
            wanted = msgspec.json.decode(line, type=SetNumWorkers).num_workers
            workers += [subprocess.Popen(command) for _ in range(wanted - len(workers))]
            for worker in workers[wanted:]:
                worker.terminate()
            del workers[wanted:]
    return 0


if __name__ == "__main__":
    sys.exit(main())
