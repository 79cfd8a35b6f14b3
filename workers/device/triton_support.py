"""Tell whether Triton's kernels run on this GPU, and which errors mean that a kernel does not.

torch for CUDA brings Triton, so it can nearly always be imported. It compiles a kernel when the kernel is first
launched, and needs a C compiler then. In a container without one, each first launch would fail; some of them while
people wait for answers. So modules that have another way ask here first.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from workers.device.memory import is_out_of_memory

log = logging.getLogger("servekit.worker")


@cache
def triton_failure() -> str | None:
    """Return why Triton's kernels do not run on the current GPU; None if they do. The log says it once.

    Raises the error of a GPU that failed: see `raise_device_failure`.
    """
    try:
        from workers.device import triton_probe  # not at the top: only torch for CUDA brings Triton

        triton_probe.launch(torch.device("cuda"))
    except Exception as error:  # of the import, of a compiler, of the driver: they have no type in common
        raise_device_failure(error)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        log.warning(
            "the GPU is slow: Triton's kernels do not run here, so torch's operations take their place (%s); Triton "
            "needs a C compiler and the headers of Python and of libc",
            reason,
        )
        return reason
    return None


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the types of what a kernel raises that cannot be compiled, launched or captured.

    torch raises RuntimeError. Triton's own errors are no RuntimeErrors: a kernel that does not compile, or that needs
    more shared memory than the GPU has.
    """
    try:
        from triton import TritonError  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return (RuntimeError,)
    return RuntimeError, TritonError


def raise_device_failure(error: Exception) -> None:
    """Raise where the error of a kernel that was tried says nothing about the kernel.

    That is where the device has no memory left, or computes nothing any more.
    """
    if is_out_of_memory(error):
        raise error
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # After an illegal access, for example, every call to the device fails until the process ends. A kernel that
        # does not exist for this GPU, or that cannot be launched, leaves the device as it was, and this returns.
        torch.cuda.synchronize()
