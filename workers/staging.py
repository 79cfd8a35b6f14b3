"""To the device and back, so that nobody waits: arrays in one copy; answers that are there once a mark is passed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; what a GPU likes to read at once


def staged(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The same numbers as tensors on the device, each of its own dtype and shape.

    On a CPU they share the arrays' memory. Elsewhere they are views of one buffer, which was pinned memory before: each
    copy by itself would cost the host as much as launching a kernel, and out of pageable memory it would wait for the
    device. torch keeps the pinned memory until the copy is done.
    """
    dense = [np.ascontiguousarray(array) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in dense]
    begins = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in dense)])
    pinned = torch.empty(int(begins[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = pinned.numpy()
    for begin, array in zip(begins, dense, strict=False):
        host[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    buffer = pinned.to(device, non_blocking=True)
    return [
        buffer[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for begin, array in zip(begins.tolist(), dense, strict=False)
    ]


def on_host(tensor: Tensor) -> Tensor:
    """Its copy on the host, not to be read before a mark is passed that was set after this.

    On a CPU it is the tensor itself, which nobody may write to from now on. Out of the device it goes to pinned memory:
    to any other the copy would be waited for.
    """
    if tensor.device.type != "cuda":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class Mark:
    """A place in what the device has to do: it is passed when all that was launched before is done."""

    def __init__(self, device: torch.device) -> None:
        """Set it here and now. A CPU has done what it was asked before anybody can ask."""
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Within it, whatever waits for the GPU raises RuntimeError, as far as torch sees it: not the wait for a mark."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process torch says that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
