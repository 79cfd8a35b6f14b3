"""Find the linear layers of a decoder layer that share an input, and in which parameters it can be divided.

AWQ divides the inputs of linear layers by scales, which must be folded into what computes the inputs: a norm's weight,
or the rows of another linear layer. Tables of these pairs differ by architecture. Here they are found by running the
decoder layer: a pair is taken only if dividing the one's outputs and multiplying the others' inputs by the same
numbers leaves the decoder layer's output as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workers.compression.decoder_layers import LayerCall, hidden_states

TOLERANCE = 1e-3  # of the output's norm. A wrong pair changes the output as a whole


@dataclass(slots=True)
class InputGroup:
    """Linear layers that have the same input, by name, in the order of their calls."""

    linears: dict[str, nn.Linear]
    x: Tensor  # the input, for the sample that was run
    position: int  # of the first call, among the calls of all modules


@dataclass(slots=True)
class _Call:
    """One call of a module that may compute a group's input."""

    module: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor


@dataclass(slots=True)
class Recording:
    """The groups of a decoder layer, and the calls of its modules in the order in which they returned."""

    groups: list[InputGroup] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    output: Tensor | None = None  # hidden states

    def source_of(self, group: InputGroup, layer: nn.Module, call: LayerCall) -> Source | None:
        """Return the module whose outputs can be divided if the group's inputs are multiplied; None if there is none.

        `layer` and `call` are those of the recording.
        """
        num_channels = group.x.shape[-1]
        before = self.calls[: group.position]
        norms = [made for made in before if made.output is group.x and _has_weight(made.module, num_channels)]
        linears = [
            made
            for made in reversed(before)
            if isinstance(made.module, nn.Linear) and made.module.out_features == num_channels
        ]
        for made in [*norms, *linears]:
            if self._can_divide(made.module, group, layer, call):
                return Source(made.module, made.arguments, made.options)
        return None

    def _can_divide(self, module: nn.Module, group: InputGroup, layer: nn.Module, call: LayerCall) -> bool:
        assert self.output is not None
        # Powers of two, so that nothing is rounded. Neighbours differ, and so do channels at equal places of heads.
        factors = 2.0 ** (torch.arange(group.x.shape[-1]) * 7 % 5 - 2)
        with ExitStack() as hooks:
            hooks.enter_context(module.register_forward_hook(lambda _, __, output: output / factors))
            for linear in group.linears.values():
                hooks.enter_context(linear.register_forward_pre_hook(lambda _, arguments: (arguments[0] * factors,)))
            changed = hidden_states(call.run(layer))
        return float((changed - self.output).norm()) <= TOLERANCE * float(self.output.norm())


@dataclass(frozen=True, slots=True)
class Source:
    """A module whose outputs can be divided, and a call of it."""

    module: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def divide(self, scales: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Divide the outputs by `scales`, in the parameters. Returns the scales that they are divided by in truth.

        A norm's weight is stored in `dtype`, in which the quotient is rounded, so its scales differ slightly from those
        that were asked for. If they are used to multiply, nothing is lost. Returns None, and changes nothing, for a
        module whose outputs are not in proportion to its parameters.
        """
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        assert isinstance(weight, nn.Parameter)
        if weight.ndim == 2:  # a linear layer, which will be quantized itself
            weight.data = weight / scales[:, None]
            if bias is not None:
                bias.data = _rounded(bias / scales, dtype)
            return scales
        old_weight, old_output = weight.data, self._output()
        old_bias = None if bias is None else bias.data
        for offset in (0.0, 1.0):  # the weight of some norms (Gemma) is stored minus one
            new = _rounded((old_weight + offset) / scales - offset, dtype)
            in_truth = (old_weight + offset) / (new + offset)
            is_usable = in_truth.isfinite() & (in_truth > 0)
            new, in_truth = torch.where(is_usable, new, old_weight), torch.where(is_usable, in_truth, 1.0)
            weight.data = new
            if bias is not None and old_bias is not None:
                bias.data = _rounded(old_bias / in_truth, dtype)
            difference = self._output() * in_truth - old_output
            if float(difference.norm()) <= 2 * float(torch.finfo(dtype).eps) * float(old_output.norm()):
                return in_truth
        weight.data = old_weight
        if bias is not None and old_bias is not None:
            bias.data = old_bias
        return None

    def _output(self) -> Tensor:
        output: Tensor = self.module(*self.arguments, **self.options)
        return output


def record_groups(layer: nn.Module, call: LayerCall, linears: Mapping[str, nn.Linear]) -> Recording:
    """Run a decoder layer for one sample, and group those of its linear layers by their inputs.

    A linear layer that is not called is in no group.
    """
    recording = Recording()
    by_module = {id(linear): name for name, linear in linears.items()}

    def note_input(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        name, x = by_module[id(module)], arguments[0]
        for group in recording.groups:
            if group.x is x:
                group.linears[name] = linears[name]
                return
        recording.groups.append(InputGroup({name: linears[name]}, x, len(recording.calls)))

    def note_output(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor):
            recording.calls.append(_Call(module, arguments, options, output))

    with ExitStack() as hooks:
        for linear in linears.values():
            hooks.enter_context(linear.register_forward_pre_hook(note_input))
        for module in layer.modules():
            if module is not layer:
                hooks.enter_context(module.register_forward_hook(note_output, with_kwargs=True))
        recording.output = hidden_states(call.run(layer))
    return recording


def _has_weight(module: nn.Module, num_channels: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.shape == (num_channels,)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values as they are after being stored in `dtype`."""
    return values.to(dtype).float()
