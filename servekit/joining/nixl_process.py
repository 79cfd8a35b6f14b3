"""A process that carries KV blocks with NIXL for an agent: `python -m servekit.joining.nixl_process ROLE FD FD...`.

NIXL uses UCX, which authenticates no one. Over TCP, UCX also aborts a process if its peer is lost while the process
answers it. So NIXL runs neither in the agent nor in its worker. It runs in a process that has memory with blocks and
nothing else, and that the agent starts again when it has ended. The agent says over a socket (the first FD) what is to
be done. When the socket is closed, the process ends. The other FDs are memory.

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

# One for each CUDA version. The package `nixl`, which chooses one of them, would import torch.
PACKAGES = ("nixl_cu13", "nixl_cu12")
READY, FAILED = b"+", b"-"  # the first byte of each answer
BEGIN, END = b"begin", b"end"  # of a read from a source
POLL_S = 0.0001


class ReadMemory(Struct, frozen=True):
    """Ask a reader to read what is at these addresses of its peer into its own memory, one part behind the other."""

    metadata: bytes  # of the peer, always the same
    addresses: bytes  # 64-bit numbers, one for each part
    sizes: bytes  # of the parts, in bytes; 64-bit numbers, too
    limit_s: float


def main(role: str, fds: Sequence[int]) -> None:
    """Do what the agent says, until it closes the socket."""
    ignore_signals()
    agent: Connection[Any, Any] = Connection(fds[0])
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            run = serve_source if role == "source" else serve_reader
            run(agent, fds[1:])
        except Exception as error:  # those of NIXL have no class in common
            agent.send_bytes(FAILED + (str(error) or type(error).__name__).encode())
    sys.stdout.flush()
    os._exit(0)  # the kernel ends what is under way; an orderly exit would let UCX warn of it


def serve_source(agent: Connection[Any, Any], fds: Sequence[int]) -> None:
    """Let peers read the blocks in this memory."""
    nixl = make_nixl()
    agent.recv_bytes()  # says that the worker has laid out the memory
    rings = [BlockRing.attach(fd, is_writer=True) for fd in fds]  # RDMA needs memory that is writable
    nixl.register_memory([region(ring.rows) for ring in rings], "DRAM")
    addresses = np.array([ring.rows.ctypes.data for ring in rings], np.uint64)
    agent.send_bytes(READY + msgspec.msgpack.encode((nixl.get_agent_metadata(), addresses.tolist())))
    num_reads = 0
    while True:
        if agent.poll(0 if num_reads else None):
            num_reads += 1 if agent.recv_bytes() == BEGIN else -1
        else:  # a thread of NIXL could do this, but would take a tenth of a core or more also while nothing is read
            nixl.get_new_notifs()
            time.sleep(POLL_S)


def serve_reader(agent: Connection[Any, Any], fds: Sequence[int]) -> None:
    """Read from one peer into this memory. Raises if a read fails: then the process ends, and all that is under way."""
    nixl = make_nixl()
    agent.recv_bytes()  # says that the memory has its size
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
    """Return a NIXL agent without threads. It does nothing, and answers no peer, unless it is called."""
    nixl = import_nixl()
    settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = nixl.nixl_agent(f"servekit-{secrets.token_hex(8)}", settings)
    if "UCX" not in agent.backends:
        raise RuntimeError("NIXL has no UCX backend")
    return agent


def import_nixl() -> Any:
    """Return the package that is installed. For memory of the host, either CUDA version will do."""
    try:
        from nixl_cu13 import _api as for_cuda_13

        return for_cuda_13
    except ModuleNotFoundError:
        from nixl_cu12 import _api as for_cuda_12

        return for_cuda_12


def region(memory: NDArray[np.uint8]) -> tuple[int, int, int, str]:
    """Return memory of the host as NIXL describes it: address, number of bytes, device, and a name."""
    return memory.ctypes.data, memory.nbytes, 0, ""


if __name__ == "__main__":
    main(sys.argv[1], [int(fd) for fd in sys.argv[2:]])
