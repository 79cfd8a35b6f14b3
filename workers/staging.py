"""To the device and back, so that nobody waits: all arrays of a step in one copy, and its answer when it is wanted."""

from __future__ import annotations

from collections.abc import Callable
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


def on_host(numbers: Tensor) -> Callable[[], list[int]]:
    """The numbers of a flat tensor, to be had when whatever computes them is done: what is returned waits for that."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[int]:
        done.synchronize()
        known: list[int] = copy.tolist()
        return known

    return wait
