"""Quantize the linear layers of one decoder layer by one of the methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from servekit.protocol.quantization_job import CALIBRATED, QuantizationJob
from workers.compression.decoder_layers import DecoderLayers, LayerCall, hidden_states
from workers.compression.input_groups import InputGroup, Recording, record_groups
from workers.quantization.methods.awq import round_clipped, search_scales
from workers.quantization.methods.gptq import round_gptq
from workers.quantization.methods.grid import Grid, RoundedMatrix
from workers.quantization.methods.input_statistics import InputStatistics
from workers.quantization.methods.rtn import round_to_nearest

COMPARED_SAMPLES = 4  # whose outputs are kept, to report the error of a layer


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """What has become of a decoder layer. Names are those within the layer."""

    matrices: dict[str, RoundedMatrix]  # by linear layer
    parameters: dict[str, Tensor]  # others that were changed
    error: float  # of its outputs, or of the weights if there are no samples; relative to their norm
    without_statistics: list[str]  # linear layers that no sample has reached


class LayerQuantizer:
    """Quantizes decoder layers, one after the other, as a job says."""

    def __init__(self, job: QuantizationJob, layers: DecoderLayers | None, dtype: torch.dtype) -> None:
        """`layers` computes the samples; None if there are none. `dtype` is that in which parameters are stored."""
        self._job, self._layers, self._dtype = job, layers, dtype

    @property
    def has_samples(self) -> bool:
        return self._layers is not None

    def quantize(self, index: int, layer: nn.Module, grids: Mapping[str, Grid]) -> QuantizedLayer:
        """Quantize the linear layers for which there is a grid, by name.

        `layer` is a copy of the decoder layer in float32. Its weights become the quantized ones, and the samples are
        computed with them, for the next layer.
        """
        linears = {name: _linear(layer, name) for name in grids}
        parameters: dict[str, Tensor] = {}
        statistics: dict[str, InputStatistics] = {}
        expected: list[Tensor] = []
        if self._layers is not None:
            calls = self._layers.calls(index)
            expected = [hidden_states(call.run(layer)) for call in islice(calls, COMPARED_SAMPLES)]
            if self._job.method in CALIBRATED:
                call = next(self._layers.calls(index))
                recording = record_groups(layer, call, linears)
                statistics = _measure(layer, self._layers.calls(index), linears, recording.groups)
                if self._job.method == "awq":
                    parameters = self._scale(layer, call, recording, statistics, grids)
        weights = {name: linear.weight.data for name, linear in linears.items()}
        matrices = {name: self._round(weights[name], statistics.get(name), grids[name]) for name in grids}
        for name, matrix in matrices.items():
            linears[name].weight.data = matrix.dequantize()
        if self._layers is not None:
            found = [hidden_states(call.run(layer)) for call in islice(self._layers.calls(index), len(expected))]
            error = _relative_error(zip(expected, found, strict=True))
            self._layers.compute(index, layer)
        else:
            error = _relative_error((weights[name], linears[name].weight.data) for name in grids)
        missing = [name for name in grids if name not in statistics] if self._job.method in CALIBRATED else []
        return QuantizedLayer(matrices, parameters, error, missing)

    def _round(self, weight: Tensor, statistics: InputStatistics | None, grid: Grid) -> RoundedMatrix:
        if statistics is None:
            return round_to_nearest(weight, grid)
        if self._job.method == "awq":
            return round_clipped(weight, statistics.gram, grid)
        return round_gptq(
            weight,
            statistics.gram,
            grid,
            dampening=self._job.dampening,
            in_order_of_activation=self._job.activation_order,
        )

    def _scale(
        self,
        layer: nn.Module,
        call: LayerCall,
        recording: Recording,
        statistics: Mapping[str, InputStatistics],
        grids: Mapping[str, Grid],
    ) -> dict[str, Tensor]:
        """Multiply columns of weights by AWQ's scales, and divide what computes their inputs.

        Returns the parameters that are not weights of linear layers and have changed, as they are stored.
        """
        # All before the first is scaled: they are compared with the output of the layer as it was.
        sources = [(group, recording.source_of(group, layer, call)) for group in recording.groups]
        changed: set[int] = set()
        for group, source in sources:
            if source is None:
                continue
            measured = statistics[next(iter(group.linears))]
            weights = [linear.weight.data for linear in group.linears.values()]
            scales = search_scales(weights, measured, [grids[name] for name in group.linears])
            applied = source.divide(scales, self._dtype)
            if applied is None:
                continue
            for linear in group.linears.values():
                linear.weight.data = linear.weight.data * applied
            measured.divide(applied)
            changed.add(id(source.module))
        return {
            f"{name}.{part}": parameter.data.to(self._dtype)
            for name, module in layer.named_modules()
            if id(module) in changed
            for part, parameter in module.named_parameters(recurse=False)
            if part != "weight" or name not in grids
        }


def _measure(
    layer: nn.Module, calls: Iterator[LayerCall], linears: Mapping[str, nn.Linear], groups: Iterable[InputGroup]
) -> dict[str, InputStatistics]:
    """Run the layer for all samples. Returns the statistics of the inputs of its linear layers that are called.

    Those of a group have the same statistics.
    """
    first_of = {name: next(iter(group.linears)) for group in groups for name in group.linears}
    statistics = {
        name: InputStatistics(linear.in_features)
        for name, linear in linears.items()
        if first_of.get(name, name) == name
    }

    def measure(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        statistics[name].add(arguments[0])

    with ExitStack() as hooks:
        for name in statistics:
            hooks.enter_context(linears[name].register_forward_pre_hook(partial(measure, name)))
        for call in calls:
            call.run(layer)
    found = {name: statistics[first_of.get(name, name)] for name in linears}
    return {name: measured for name, measured in found.items() if measured.num_tokens > 0}


def _relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the norm of the differences of all pairs, relative to that of the first of each."""
    squares = torch.zeros(2, dtype=torch.float64)
    for wanted, found in pairs:
        squares += torch.stack([(found - wanted).double().square().sum(), wanted.double().square().sum()])
    return float((squares[0] / squares[1].clamp_min(1e-300)).sqrt())


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found
