"""Decode steps as CUDA graphs: one launch instead of hundreds, which is most of what a small model's step costs.

A graph is what was launched once, at fixed addresses; so it is captured for a number of rows, and every step of that
many rows or somewhat fewer is copied into its inputs. Rows that are too many have length 0 and write to no cell. The
largest is captured when the worker loads: what memory it takes is then known, and the others share all of it. Each of
them is captured when it is first needed, so that serving begins in seconds.

All graphs read the same inputs and write the same logits, each the first rows of them. That is safe because they are
launched into one stream, in which steps are done one after the other: what still reads the logits of a step, to choose
its tokens, was launched before the next one's inputs are filled, and nobody on the host ever reads them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from workers.batch import Batch
from workers.paged_step import StepRows
from workers.staging import waiting_refused

log = logging.getLogger("servekit.worker")

NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

# From token ids [1, num_tokens], positions alike and rows to logits [num_tokens, vocab_size] of any dtype.
Forward = Callable[[Tensor, Tensor, StepRows], Tensor]


class Replay(Protocol):
    """What was captured; it can be done again, with what stands in its inputs then."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Replay]  # of what is to be repeated; raises RuntimeError


class DecodeGraphs:
    """All graphs of one model."""

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
        """`table_width`: blocks that the longest sequence can have."""
        self._forward = forward
        self._capture = capture
        smaller = [num_rows for num_rows in NUM_ROWS if num_rows < max_num_rows]
        self._sizes = [*smaller, max_num_rows] if max_num_rows <= NUM_ROWS[-1] else smaller
        self._inputs = _Inputs.make(self._sizes[-1], table_width, block_size, device)
        self._logits = torch.zeros(self._sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[int, Replay | None] = {}  # by number of rows; None cannot be captured

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [num_rows, vocab_size] in float32, to be read by what is launched before the next run.

        None, and nothing is done, unless each row computes one token and samples the next, and there is a graph of that
        size.
        """
        num_rows = len(batch.rows.num_keys)
        is_decode = len(batch.position_ids) == num_rows == len(batch.sampling) and not batch.prompt_rows
        if not is_decode or num_rows > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        if size not in self._graphs:
            self._try_to_capture(size)
        graph = self._graphs[size]
        if graph is None:
            return None
        self._inputs.fill(batch, size)
        graph.replay()
        return self._logits[:num_rows]

    def capture_largest(self) -> None:
        """Raises what capturing it raises."""
        self._graphs[self._sizes[-1]] = self._captured(self._sizes[-1])

    def _try_to_capture(self, size: int) -> None:
        self._graphs[size] = None
        try:
            self._graphs[size] = self._captured(size)
        except RuntimeError as error:  # also if memory does not hold it, which may be so in a full service only
            log.warning("decode steps of %d rows are launched one kernel at a time, from now on: %s", size, error)

    def _captured(self, size: int) -> Replay:
        # It is computed as it is captured, and what an earlier step left in the inputs names cells of others by now.
        self._inputs.clear(size)
        inputs, logits = self._inputs.first(size), self._logits[:size]

        def compute() -> None:
            # In the model's own dtype until here: the copy is what makes them float32.
            logits.copy_(self._forward(inputs.token_ids[None], inputs.positions[None], inputs.rows))

        return self._capture(compute)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What graphs read, at addresses that stay. As they are made, all rows are padding."""

    token_ids: Tensor  # [num_rows]
    positions: Tensor  # [num_rows]
    rows: StepRows

    @classmethod
    def make(cls, num_rows: int, table_width: int, block_size: int, device: torch.device) -> _Inputs:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = StepRows(
            block_size,
            num_queries=np.ones(num_rows, dtype=np.int64),
            num_keys=np.full(num_rows, table_width * block_size),
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            lengths=zeros(num_rows, dtype=torch.int32),
            block_table=zeros(num_rows, table_width, dtype=torch.int32),
            slot_mapping=zeros(num_rows) - 1,
        )
        return cls(zeros(num_rows), zeros(num_rows), rows)

    def first(self, num_rows: int) -> _Inputs:
        """The first rows of them, in the same memory."""
        rows = StepRows(
            self.rows.block_size,
            self.rows.num_queries[:num_rows],
            self.rows.num_keys[:num_rows],
            self.rows.query_starts[: num_rows + 1],
            self.rows.lengths[:num_rows],
            self.rows.block_table[:num_rows],
            self.rows.slot_mapping[:num_rows],
        )
        return _Inputs(self.token_ids[:num_rows], self.positions[:num_rows], rows)

    def fill(self, batch: Batch, size: int) -> None:
        """A step of as many rows as the graph's size, or fewer: what another left behind them must go."""
        num_rows, width = batch.rows.block_table.shape
        self.token_ids[:num_rows] = batch.input_ids
        self.positions[:num_rows] = batch.position_ids
        self.rows.block_table[:num_rows, :width] = batch.rows.block_table
        self.rows.lengths[:num_rows] = batch.rows.lengths
        self.rows.slot_mapping[:num_rows] = batch.rows.slot_mapping
        if num_rows < size:
            self.clear(size, num_rows)

    def clear(self, size: int, num_rows: int = 0) -> None:
        """Let all rows of a graph of that size be padding, from `num_rows` on."""
        self.rows.lengths[num_rows:size] = 0
        self.rows.slot_mapping[num_rows:size] = -1


@cache
def _stream_of_captures() -> Any:
    """One for all: libraries keep a workspace for each stream that they were called in, for good."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class CudaCapture:
    """Captures on a GPU. All graphs share one pool of memory, for they never run at once."""

    def __init__(self) -> None:
        self._stream = _stream_of_captures()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            # This one outside of torch's own, which leaves its stream the current one if the capture fails.
            with torch.cuda.stream(self._stream):
                # Once before: Triton compiles, cuBLAS takes its workspace, and none of that may happen in a capture.
                # Then once more, to see whether anything waits for the device: here that does no harm.
                compute()
                with waiting_refused():
                    compute()
                return self._captured(compute)
        finally:
            current.wait_stream(self._stream)  # also of what failed half-way: it writes where all graphs write

    def _captured(self, compute: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                compute()
        except RuntimeError:
            # Where the driver called the capture off, torch still takes it to be under way: it would refuse to give
            # memory back, which is what it does when there is none left.
            with contextlib.suppress(RuntimeError, AttributeError):  # the latter if its name is another
                torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
            raise
        return graph
