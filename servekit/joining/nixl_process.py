"""A process that carries KV blocks with NIXL for an agent: `python -m servekit.joining.nixl_process ROLE FD FD...`.

UCX, which NIXL uses, authenticates no one, and over TCP it aborts the process whose peer is lost while it answers. So
NIXL runs neither in the agent nor in its worker, but in a process that has nothing else than memory with blocks, and
that is started again when it ends. The agent says over a socket (the first FD) what is to be done. When that is closed,
the process ends. The other FDs are memory.

- A *source* has blocks: it answers with its metadata, and then lets peers read while the agent says so.
- A *reader* reads from one peer: it gets `ReadMemory`, and answers with an empty message, or with what went wrong.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from servekit.protocol.block_ring import BlockRing
from servekit.protocol.child_process import ignore_signals

# One for each CUDA version. `nixl`, which chooses one, would import torch.
PACKAGES = ("nixl_cu13", "nixl_cu12")
READY, FAILED = b"+", b"-"  # the first byte of each answer
BEGIN, END = b"begin", b"end"  # of a read from a source
POLL_S = 0.0001


class ReadMemory(Struct, frozen=True):
    """Ask a reader to read what is at these addresses of its peer into its memory, one after the other."""

    metadata: bytes  # of the peer, always the same
    addresses: bytes  # 64-bit numbers, as are the sizes
    sizes: bytes
    limit_s: float


def main(role: str, fds: Sequence[int]) -> None:
    """Do what the agent says, until it closes the socket."""
    ignore_signals()
    agent: Connection[Any, Any] = Connection(fds[0])
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            run = be_source if role == "source" else be_reader
            run(agent, fds[1:])
        except Exception as error:  # those of NIXL have no class in common
            agent.send_bytes(FAILED + (str(error) or type(error).__name__).encode())
    sys.stdout.flush()
    os._exit(0)  # the kernel ends what is under way, and UCX would warn of it


def be_source(agent: Connection[Any, Any], fds: Sequence[int]) -> None:
    """Let peers read the blocks in this memory."""
    nixl = make_nixl()
    agent.recv_bytes()  # now the worker has laid out the memory
    rings = [BlockRing.attach(fd, is_writer=True) for fd in fds]  # RDMA needs memory that is writable
    nixl.register_memory([region(ring.rows) for ring in rings], "DRAM")
    addresses = np.array([ring.rows.ctypes.data for ring in rings], np.uint64)
    agent.send_bytes(READY + msgspec.msgpack.encode((nixl.get_agent_metadata(), addresses.tolist())))
    num_reads = 0
    while True:
        if agent.poll(0 if num_reads else None):
            num_reads += 1 if agent.recv_bytes() == BEGIN else -1
        else:  # a thread of NIXL would do this, and take a tenth of a core or more while nothing is read
            nixl.get_new_notifs()
            time.sleep(POLL_S)


def be_reader(agent: Connection[Any, Any], fds: Sequence[int]) -> None:
    """Read from one peer into this memory. Raises when a read has failed: so all that it has left under way ends."""
    nixl = make_nixl()
    agent.recv_bytes()  # now it has its size
    memory = np.frombuffer(mmap.mmap(fds[0], os.fstat(fds[0]).st_size), np.uint8)
    nixl.register_memory([region(memory)], "DRAM")
    agent.send_bytes(READY)
    peer = ""
    while True:
        request = msgspec.msgpack.decode(agent.recv_bytes(), type=ReadMemory)
        ends_s = time.monotonic() + request.limit_s
        peer = peer or nixl.add_remote_agent(request.metadata)
        sizes, there = np.frombuffer(request.sizes, np.uint64), np.frombuffer(request.addresses, np.uint64)
        here = np.cumsum(sizes, dtype=np.uint64) - sizes + np.uint64(memory.ctypes.data)
        device = np.zeros_like(sizes)
        targets, sources = (
            nixl.get_xfer_descs(np.stack([each, sizes, device], axis=1), "DRAM") for each in (here, there)
        )
        transfer = nixl.initialize_xfer("READ", targets, sources, peer)
        state = nixl.transfer(transfer)
        while state == "PROC":
            if time.monotonic() > ends_s:
                raise TimeoutError("timed out")
            time.sleep(POLL_S)
            state = nixl.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(state)
        transfer.release()
        agent.send_bytes(READY)


def make_nixl() -> Any:
    """Make a NIXL agent without threads, so that it does nothing, and answers no peer, unless it is called."""
    nixl = import_nixl()
    settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = nixl.nixl_agent(f"servekit-{secrets.token_hex(8)}", settings)
    if "UCX" not in agent.backends:
        raise RuntimeError("it has no UCX")
    return agent


def import_nixl() -> Any:
    """Import the package that is installed; one for either CUDA version will do for memory of the host."""
    try:
        from nixl_cu13 import _api as for_cuda_13

        return for_cuda_13
    except ModuleNotFoundError:
        from nixl_cu12 import _api as for_cuda_12

        return for_cuda_12


def region(memory: NDArray[np.uint8]) -> tuple[int, int, int, str]:
    """Describe memory of the host, as NIXL wants it: address, bytes, device, and a name."""
    return memory.ctypes.data, memory.nbytes, 0, ""


if __name__ == "__main__":
    main(sys.argv[1], [int(fd) for fd in sys.argv[2:]])
