"""Run a model's decoder layers one after the other over calibration samples, each layer in float32 for its turn only.

The model's weights stay mapped from its files. What layers get besides the hidden states (masks, rotary positions)
differs by model and by layer. So the model's own forward pass makes it: the layers before return what they computed
before, and the layer in question notes what it is called with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.loading.refusals import refusal


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What the model calls a layer with, for one sample."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, layer: nn.Module) -> Any:
        return layer(*self.arguments, **self.options)


class DecoderLayers:
    """The decoder layers of a model, and what they computed of the samples."""

    def __init__(self, model: PreTrainedModel, samples: list[Tensor], architecture: str) -> None:
        """Find the layers. Raises ConfigError for a model that has no list of them.

        The few parameters between embeddings and layers become float32, as the hidden states do.
        """
        self._model, self._samples = model, samples
        self.name, self._layers = _find_layers(model, architecture)
        self._outputs: list[Any] = [None] * len(samples)  # of the last layer that was computed
        in_layers = {id(module) for layer in self._layers for module in layer.modules()}
        head = model.get_output_embeddings()
        for module in model.modules():
            is_leaf = next(module.children(), None) is None
            if is_leaf and id(module) not in in_layers and module is not head and not isinstance(module, nn.Embedding):
                module.float()
        model.get_input_embeddings().register_forward_hook(lambda _, __, rows: rows.float())

    def __len__(self) -> int:
        return len(self._layers)

    def name_of(self, index: int) -> str:
        """Return the name of a layer in the model: model.layers.3."""
        return f"{self.name}.{index}"

    def original(self, index: int) -> nn.Module:
        """Return a layer as the files have it."""
        return self._layers[index]

    def in_float32(self, index: int) -> nn.Module:
        """Return a copy of a layer in float32, which takes memory of its own."""
        return copy.deepcopy(self._layers[index]).float()

    def calls(self, index: int) -> Iterator[LayerCall]:
        """Yield what a layer is called with for each sample. The layers before it must have been computed."""
        for sample in range(len(self._samples)):
            yield self._call_of(index, sample)

    def compute(self, index: int, layer: nn.Module) -> None:
        """Compute all samples with `layer` in the place of a layer: the next layer gets what it returns."""
        for sample in range(len(self._samples)):
            self._outputs[sample] = self._call_of(index, sample).run(layer)

    def _call_of(self, index: int, sample: int) -> LayerCall:
        def return_output(*_: Any, **__: Any) -> Any:
            return self._outputs[sample]

        def reach(*arguments: Any, **options: Any) -> Any:
            raise _Reached(arguments, options)

        done, reached_now = self._layers[:index], self._layers[index : index + 1]
        with _forward_replaced(done, return_output), _forward_replaced(reached_now, reach):
            try:
                self._model(input_ids=self._samples[sample], use_cache=False)
            except _Reached as reached:
                return LayerCall(reached.arguments, reached.options)
        raise AssertionError("the model did not call its layer")


class _Reached(Exception):
    """The layer in question is called: the rest of the forward pass is not needed."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.options = arguments, options


@contextmanager
def _forward_replaced(layers: list[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Let these layers compute something else within the context."""
    for layer in layers:
        layer.forward = forward  # the instance's comes before the class's
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def hidden_states(output: Any) -> Tensor:
    """Return the hidden states of what a layer returns: a tensor, or a tuple that begins with one."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def _find_layers(model: PreTrainedModel, architecture: str) -> tuple[str, list[nn.Module]]:
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, list(module)
    raise refusal(architecture, f"it has no list of its {num_layers} layers, which are quantized one after the other")
