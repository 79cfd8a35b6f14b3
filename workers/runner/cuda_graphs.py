"""Run decode steps as CUDA graphs: one launch in place of hundreds, which are most of a small model's step time.

A graph repeats what was launched once, at fixed addresses. So it is captured for a number of rows, and every step of
that many rows or somewhat fewer is copied into its inputs. Padding rows have length 0 and write to no cell. All graphs
are captured when the worker loads, in a second or two: a capture computes the step three times, and in service all
streams would wait for it. The largest comes first, and the others share its memory.

All graphs read the same inputs and write the same logits, each the first rows of them. That is safe because they are
launched into one stream, which executes steps one after the other. The kernels that read a step's logits, to choose its
tokens, are launched before the next step's inputs are filled, and the host never reads the logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionMetadata
from workers.batch import Batch
from workers.device.transfer import synchronization_refused
from workers.device.triton_support import kernel_errors
from workers.runner.step_graphs import Capture, Replay, StepGraphs

NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

# From token ids [1, num_tokens], positions [1, num_tokens] and metadata to logits [num_tokens, vocab_size], any dtype.
Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]


class DecodeGraphs(StepGraphs):
    """All graphs of steps in which each row computes one token and samples the next, by number of rows."""

    steps = "decode steps of %d rows"

    def __init__(
        self,
        forward: Forward,
        max_num_rows: int,
        table_width: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """Allocate inputs and logits; `table_width` is how many blocks the longest sequence can have."""
        smaller = [num_rows for num_rows in NUM_ROWS if num_rows < max_num_rows]
        sizes = [*smaller, max_num_rows] if max_num_rows <= NUM_ROWS[-1] else smaller
        super().__init__(sizes, torch.zeros(sizes[-1], vocab_size, dtype=torch.float32, device=device), capture)
        self._forward = forward
        self._inputs = _Inputs.make(sizes[-1], table_width, block_size, device)

    def _can_hold(self, batch: Batch) -> bool:
        num_rows = self._size_of(batch)
        is_decode = len(batch.position_ids) == num_rows == len(batch.sampling) and not batch.prompt_logprobs
        return is_decode and num_rows <= self._sizes[-1]

    def _size_of(self, batch: Batch) -> int:
        return len(batch.attention.num_keys)

    def _fill(self, batch: Batch, size: int) -> None:
        self._inputs.fill(batch, size)

    def _clear(self, size: int) -> None:
        self._inputs.clear(size)

    def _compute(self, size: int) -> None:
        inputs = self._inputs.first(size)
        # The model's logits are in its own dtype; the copy converts them to float32.
        self.logits[:size].copy_(self._forward(inputs.token_ids[None], inputs.positions[None], inputs.attention))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The graphs' inputs, at fixed addresses. All rows are padding at first."""

    token_ids: Tensor  # [num_rows]
    positions: Tensor  # [num_rows]
    attention: AttentionMetadata

    @classmethod
    def make(cls, num_rows: int, table_width: int, block_size: int, device: torch.device) -> _Inputs:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        attention = AttentionMetadata(
            block_size,
            num_queries=np.ones(num_rows, dtype=np.int64),
            num_keys=np.full(num_rows, table_width * block_size),
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            lengths=zeros(num_rows, dtype=torch.int32),
            block_table=zeros(num_rows, table_width, dtype=torch.int32),
            slot_mapping=zeros(num_rows) - 1,
        )
        return cls(zeros(num_rows), zeros(num_rows), attention)

    def first(self, num_rows: int) -> _Inputs:
        """Return the inputs of the first rows, in the same memory."""
        attention = AttentionMetadata(
            self.attention.block_size,
            self.attention.num_queries[:num_rows],
            self.attention.num_keys[:num_rows],
            self.attention.query_starts[: num_rows + 1],
            self.attention.lengths[:num_rows],
            self.attention.block_table[:num_rows],
            self.attention.slot_mapping[:num_rows],
        )
        return _Inputs(self.token_ids[:num_rows], self.positions[:num_rows], attention)

    def fill(self, batch: Batch, size: int) -> None:
        """Copy a step of `size` rows or fewer into the inputs; rows beyond it become padding."""
        num_rows, width = batch.attention.block_table.shape
        self.token_ids[:num_rows] = batch.input_ids
        self.positions[:num_rows] = batch.position_ids
        self.attention.block_table[:num_rows, :width] = batch.attention.block_table
        self.attention.lengths[:num_rows] = batch.attention.lengths
        self.attention.slot_mapping[:num_rows] = batch.attention.slot_mapping
        if num_rows < size:
            self.clear(size, num_rows)

    def clear(self, size: int, num_rows: int = 0) -> None:
        """Make rows from `num_rows` to `size` padding."""
        self.attention.lengths[num_rows:size] = 0
        self.attention.slot_mapping[num_rows:size] = -1


@cache
def _capture_stream() -> Any:
    """Return one stream for all captures: libraries keep a workspace for every stream they were ever called in."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class CudaCapture:
    """Captures on a GPU. All graphs share one pool of memory, since they never run at the same time."""

    def __init__(self) -> None:
        self._stream = _capture_stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Replay:
        """Capture what `compute` launches. Raises one of kernel_errors(), also where it waits for the device."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            # Set outside of torch.cuda.graph, which leaves its stream the current one if the capture fails.
            with torch.cuda.stream(self._stream):
                # Once before: Triton compiles and cuBLAS allocates its workspace, which must not happen in a capture.
                # Then once more, to find out whether anything waits for the device; here that does no harm.
                compute()
                with synchronization_refused():
                    compute()
                return self._captured(compute)
        finally:
            current.wait_stream(self._stream)  # also after a failed capture: it writes where all graphs write

    def _captured(self, compute: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        try:
            # By default, no thread of the process may call what is forbidden in a capture. Those of libraries, such as
            # NCCL's, ask for events at any time.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except kernel_errors():
            # Where the driver cancelled the capture, torch still believes that it is under way. It would refuse to free
            # memory, which it has to do when there is none left.
            with contextlib.suppress(RuntimeError, AttributeError):  # the latter if a version of torch renames it
                torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
            raise
        return graph
