"""Decode steps as CUDA graphs: one launch instead of hundreds, which is most of what a small model's step costs.

A graph is what was launched once, at fixed addresses; so it is captured for a number of rows, and every step of that
many rows or somewhat fewer is copied into its inputs. Rows that are too many have length 0 and write to no cell. The
largest is captured when the worker loads: what memory it takes is then known, and the others share it, but for their
logits. Each of them is captured when it is first needed, so that serving begins in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from workers.batch import Batch
from workers.paged_step import StepRows

NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

# From token ids [1, num_tokens], positions alike and rows to logits [num_tokens, vocab_size].
Forward = Callable[[Tensor, Tensor, StepRows], Tensor]


class Replay(Protocol):
    """What was captured; it can be done again, with what stands in its inputs then."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]  # what to do -> its repetition, and where it answers


class DecodeGraphs:
    """All graphs of one model."""

    def __init__(
        self,
        forward: Forward,
        max_num_rows: int,
        table_width: int,
        block_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """`table_width`: blocks that the longest sequence can have."""
        self._forward = forward
        self._capture = capture
        self._sizes_of_inputs = (table_width, block_size, device)
        smaller = [num_rows for num_rows in NUM_ROWS if num_rows < max_num_rows]
        self._sizes = [*smaller, max_num_rows] if max_num_rows <= NUM_ROWS[-1] else smaller
        self._graphs: dict[int, tuple[_Inputs, Replay, Tensor]] = {}

    def takes(self, batch: Batch) -> bool:
        """Whether all its rows compute one token, and sample the next."""
        num_rows = len(batch.rows.num_keys)
        is_decode = len(batch.position_ids) == num_rows == len(batch.sampling)
        return is_decode and num_rows <= self._sizes[-1] and not batch.prompt_rows

    def run(self, batch: Batch) -> Tensor:
        """Logits [num_rows, vocab_size] in float32, valid until the next run."""
        num_rows = len(batch.rows.num_keys)
        inputs, graph, logits = self._graph_for(num_rows)
        inputs.fill(batch)
        graph.replay()
        return logits[:num_rows]

    def capture_largest(self) -> None:
        self._graph_for(self._sizes[-1])

    def _graph_for(self, num_rows: int) -> tuple[_Inputs, Replay, Tensor]:
        size = next(size for size in self._sizes if size >= num_rows)
        if size not in self._graphs:
            inputs = _Inputs.make(size, *self._sizes_of_inputs)
            graph, logits = self._capture(lambda: self._forward(inputs.input_ids, inputs.position_ids, inputs.rows))
            self._graphs[size] = (inputs, graph, logits)
        return self._graphs[size]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a graph reads, at addresses that stay. As they are made, all rows are padding."""

    input_ids: Tensor  # [1, num_rows]
    position_ids: Tensor  # [1, num_rows]
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
        return cls(zeros(1, num_rows), zeros(1, num_rows), rows)

    def fill(self, batch: Batch) -> None:
        """A step of as many rows, or fewer: then what the step before left of its own must go."""
        num_rows, width = batch.rows.block_table.shape
        self.input_ids[0, :num_rows] = batch.input_ids
        self.position_ids[0, :num_rows] = batch.position_ids
        self.rows.block_table[:num_rows, :width] = batch.rows.block_table
        self.rows.lengths[:num_rows] = batch.rows.lengths
        self.rows.slot_mapping[:num_rows] = batch.rows.slot_mapping
        if num_rows < len(self.rows.lengths):
            self.rows.lengths[num_rows:] = 0
            self.rows.slot_mapping[num_rows:] = -1


class CudaCapture:
    """Captures on a GPU. All graphs share one pool of memory, for they never run at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        # Once before: Triton compiles, cuBLAS takes its workspace, and none of that may happen in a capture.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()
        self._pool = self._pool or graph.pool()
        return graph, output
