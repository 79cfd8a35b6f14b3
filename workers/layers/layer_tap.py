"""Keep the hidden states between the layers of a decoder, for a drafter that reads them (EAGLE-3)."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerTap:
    """Keeps what enters the layers of the given numbers, in each forward pass.

    The number of layers itself stands for what the last layer returns, before the last norm. For a decoder without a
    tap, this costs one comparison for each layer.
    """

    def __init__(self, layers: tuple[int, ...], multiplier: float = 1.0) -> None:
        """`multiplier` is what turns the hidden states that are kept into those of transformers' layers."""
        self.layers, self._multiplier = layers, multiplier
        self._kept: dict[int, Tensor] = {}

    def keep(self, layer: int, x: Tensor) -> None:
        """Keep x [num_tokens, hidden_size], which must not be overwritten, if the layer is one of those."""
        if layer in self.layers:
            self._kept[layer] = x

    def keep_copy(self, layer: int, x: Tensor) -> None:
        """Keep x [num_tokens, hidden_size], which the layer may overwrite, if the layer is one of those."""
        if layer in self.layers:
            self._kept[layer] = x.clone()

    def take(self) -> Tensor:
        """Return the hidden states side by side [num_tokens, num_layers * hidden_size], and keep them no longer."""
        kept, self._kept = self._kept, {}
        states = torch.cat([kept[layer] for layer in self.layers], dim=-1)
        return states if self._multiplier == 1.0 else states * self._multiplier
