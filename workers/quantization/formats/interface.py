"""The interface between the loader and a format of quantized weights.

In the files, a matrix is several tensors, whose names begin with the same prefix: the codes, their scales, and so on.
What follows the prefix is the tensor's suffix, with its dot: `.qweight`. A format is given the tensors of one matrix by
suffix. They are mapped from the file, so a tensor takes memory only when a format computes with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from workers.quantization.quantized_tensor import QuantizedTensor


class WeightFormat(ABC):
    """One format, as the `quantization_config` of a config.json describes it."""

    name: str  # for logs and messages: "GPTQ, 4 bits"
    # A matrix is quantized if it has a tensor of one of these. config.json's lists (targets, ignore) are not used.
    markers: ClassVar[frozenset[str]]
    suffixes: ClassVar[frozenset[str]]  # of all tensors that are read, with `markers`; some may be optional
    # What follows the prefix in the name of the unquantized parameter.
    parameter_suffix: ClassVar[str] = ".weight"
    # Whether the files hold codes. If not, numbers are rounded as they are read, where `takes` says so.
    is_stored: ClassVar[bool] = True
    # Whether files of the format may have no quantized matrix at all.
    may_be_absent: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the format that a `quantization_config` describes.

        The mapping comes from a file and may be hostile: each value that is used must be checked. Raises ConfigError,
        which names the value and what to do, for a variant that is not read.
        """

    @abstractmethod
    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        """Return the shape of the parameter: [num_outputs, num_inputs] for a linear layer.

        `tensors` are those of one matrix that the files have, by suffix; `name` is their prefix. Raises ConfigError, in
        one sentence, if one is missing or has a shape or a dtype that the format does not allow. The loader checks all
        matrices before it reads the first one. So this looks at shapes and dtypes only, and at values of tensors of a
        few bytes.
        """

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        """Return the matrix. `check` has accepted these tensors.

        It may hold parts of `tensors` itself. Raises ConfigError for values that no checkpoint has: scales that are not
        finite, indices out of range.
        """

    def takes(self, module_name: str) -> bool:
        """Return whether a linear layer's matrix, which has a marker, is quantized."""
        return True

    def dequantize(self, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        """Return the parameter as numbers, in the shape of `check`, for layers that take no quantized weights.

        transformers stacks the experts of a mixture into one parameter, so they are read so.
        """
        return self.read(tensors, name).dequantize(dtype)
