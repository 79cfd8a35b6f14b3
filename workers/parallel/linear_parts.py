"""Which inputs and outputs of a linear layer a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.parallel.rank_group import RankGroup
from workers.parallel.tensor_parallel_plan import CUTS_INPUTS, CUTS_OUTPUTS, TensorParallelPlan


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A rank's part of a linear layer, and the size of the whole layer."""

    num_inputs: int  # of the whole layer
    num_outputs: int
    inputs: slice  # those that the rank has
    outputs: Tensor  # [the rank's number of outputs] their indices, of which some may be there twice


class LinearParts:
    """The parts of all linear layers, by a plan."""

    def __init__(self, plan: TensorParallelPlan, group: RankGroup) -> None:
        self._plan, self._group = plan, group

    def outputs_of(self, name: str, num_outputs: int) -> Tensor | None:
        """Return the indices of this rank's outputs, of the num_outputs of the layer `name`; None: all of them."""
        plan, group = self._plan, self._group
        style, outputs = plan.style_of_parameter(f"{name}.weight"), torch.arange(num_outputs)
        if plan.is_selected(name):
            by_head = outputs.view(plan.num_kv_heads, -1)
            return by_head[torch.tensor(plan.kv_heads_of(group.rank))].flatten()
        if style == "packed_colwise":  # gates and ups, each cut by itself
            half = num_outputs // 2
            rows = outputs[group.share(half)]
            return torch.cat([rows, rows + half])
        return outputs[group.share(num_outputs)] if style in CUTS_OUTPUTS else None

    def inputs_of(self, name: str, num_inputs: int) -> slice | None:
        """Return this rank's inputs, of the num_inputs of the layer `name`; None: all of them."""
        cuts = self._plan.style_of_parameter(f"{name}.weight") in CUTS_INPUTS
        return self._group.share(num_inputs) if cuts else None

    def part_of(self, name: str, num_inputs: int, num_outputs: int) -> LinearPart:
        """Return the part of a layer, of which this rank has so many inputs and outputs. Call it on all ranks."""
        plan, group = self._plan, self._group
        style = plan.style_of_parameter(f"{name}.weight")
        if plan.is_selected(name):
            num_outputs = num_outputs // len(plan.kv_heads_of(group.rank)) * plan.num_kv_heads
        elif style in CUTS_OUTPUTS:
            num_outputs = group.total(num_outputs)
        elif style in CUTS_INPUTS:
            num_inputs = group.total(num_inputs)
        inputs, outputs = self.inputs_of(name, num_inputs), self.outputs_of(name, num_outputs)
        return LinearPart(
            num_inputs,
            num_outputs,
            slice(0, num_inputs) if inputs is None else inputs,
            torch.arange(num_outputs) if outputs is None else outputs,
        )

    def total(self, value: int) -> int:
        """Return the sum of the ranks' values."""
        return self._group.total(value)
