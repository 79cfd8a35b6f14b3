"""Copy to the device and back without waiting for it: arrays in one copy, answers once an event is complete."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; GPUs read aligned vectors of this size at once


def to_device(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on the device, each of its own dtype and shape.

    On a CPU they share the arrays' memory. Elsewhere they are views of one buffer, which is copied from pinned memory.
    A copy for each array would cost the host as much as launching a kernel, and a copy from pageable memory waits for
    the device. torch keeps the pinned memory until the copy is done.
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


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor's copy on the host. Read it only once a DeviceEvent is complete that was recorded after this.

    On a CPU it is the tensor itself, which must not be written to from then on. A copy from a GPU goes to pinned
    memory: the copy to any other memory waits for the device.
    """
    if tensor.device.type != "cuda":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class DeviceEvent:
    """A point in the device's queue: complete when everything that was launched before it is done."""

    def __init__(self, device: torch.device) -> None:
        """Record the event now. A CPU has no queue: its events are complete from the start."""
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_complete(self) -> bool:
        """Return whether everything before the event is done, without waiting."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until everything before the event is done."""
        if self._event is not None:
            self._event.synchronize()


@contextmanager
def synchronization_refused() -> Iterator[None]:
    """Within the context, torch operations that wait for the GPU raise RuntimeError; waiting for an event does not."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once a process that its check does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
