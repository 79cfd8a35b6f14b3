"""What calibration measures of the inputs of a linear layer: enough for GPTQ and AWQ, in memory that does not grow."""

from __future__ import annotations

import torch
from torch import Tensor


class InputStatistics:
    """Sums over the inputs x of a linear layer.

    For weights that change by D, the squared error of the outputs is the sum over all rows d of D of d' G d, where G,
    the Gram matrix, is the sum of x x' over all inputs. So no input has to be kept.
    """

    def __init__(self, num_inputs: int) -> None:
        self.gram = torch.zeros(num_inputs, num_inputs)
        self._magnitude = torch.zeros(num_inputs)
        self.num_tokens = 0

    @property
    def mean_magnitude(self) -> Tensor:
        """The mean of |x| of each input, [num_inputs]."""
        return self._magnitude / max(self.num_tokens, 1)

    def add(self, x: Tensor) -> None:
        """Count inputs [..., num_inputs]."""
        x = x.flatten(0, -2).float()
        self.gram.addmm_(x.T, x)
        self._magnitude += x.abs().sum(dim=0)
        self.num_tokens += len(x)

    def divide(self, scales: Tensor) -> None:
        """Change the sums to those of inputs that are divided by scales [num_inputs]."""
        self.gram /= scales[:, None] * scales
        self._magnitude /= scales


def squared_error(difference: Tensor, gram: Tensor) -> float:
    """Return the squared error of outputs when weights change by `difference` [num_outputs, num_inputs]."""
    return float((difference @ gram).mul_(difference).sum())
