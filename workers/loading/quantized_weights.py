"""Build a model with quantized weights: those of its files, or those that are quantized as they are read.

transformers builds the model and reads what is not quantized: embeddings, norms, biases, single layers. Its quantizers
are not used. In their place, the linear layers whose matrices are quantized are replaced before the model is filled,
and are filled here, one matrix at a time. So memory holds one matrix more than the model, at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from servekit.errors import ConfigError
from servekit.protocol.gguf_index import WEIGHTS as GGUF
from workers.device.heap import trim_heap
from workers.layers.linear import is_plain_linear
from workers.layers.quantized_linear import QuantizedEmbedding, QuantizedLinear
from workers.loading.checkpoint import find_weights
from workers.loading.gguf_file import GgufFile
from workers.loading.gguf_index import has_gguf
from workers.loading.progress import Progress
from workers.loading.tensor_files import Lazy, TensorFiles, TensorSource
from workers.loading.weights import check_complete, check_extent, tensors_counted
from workers.parallel.local_parameters import local_matrix, partial_class
from workers.parallel.ranks import Ranks
from workers.parallel.tensor_parallel_plan import TensorParallelPlan
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import QuantizedTensor

log = logging.getLogger("servekit.worker")

MOST_GROWTH = 1.1  # of a matrix that is kept in memory, relative to its size in the files


class QuantizedMatrices:
    """Which matrices of the files are quantized, and which linear layer of the model has each of them."""

    def __init__(
        self,
        source: TensorSource,
        weight_format: WeightFormat,
        described: PreTrainedModel,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
    ) -> None:
        """Check the shapes of all quantized matrices, without reading them.

        `described` is the model without memory, as config.json describes it; `dtype` is that of its numbers. Raises
        ConfigError for files that do not belong to it.
        """
        self._source, self._format, self._dtype = source, weight_format, dtype
        names, markers = set(source.names()), weight_format.markers
        prefixes = sorted({name.removesuffix(marker) for name in names for marker in markers if name.endswith(marker)})
        self._suffixes = {
            prefix: [suffix for suffix in weight_format.suffixes if prefix + suffix in names] for prefix in prefixes
        }
        # The prefix of each linear layer's matrix, by the layer's name. config.json's own lists of quantized layers are
        # not used: the tensors in the files decide.
        self._prefix_of: dict[str, str] = {}
        linears = _linears_of(described)
        # Ranks divide embeddings and heads in different ways, and stages have only one of them. So these are not tied
        # there.
        tied = _tied_of(described) if ranks is None else None
        if tied is not None:
            linears[tied.embedding] = tied.head_layer
        for prefix in prefixes:
            name = _name_of(prefix, linears, described.base_model_prefix)
            if name is not None and weight_format.takes(name):
                self._prefix_of[name] = prefix
        self._tied = None
        if tied is not None and tied.embedding in self._prefix_of:
            self._tied, linears[tied.head] = tied, tied.head_layer
            self._prefix_of[tied.head] = self._prefix_of.pop(tied.embedding)
        taken = set(self._prefix_of.values())
        if not weight_format.is_stored:
            self._suffixes = {prefix: suffixes for prefix, suffixes in self._suffixes.items() if prefix in taken}
        self._others = sorted(self._suffixes.keys() - taken)  # which no linear layer takes
        if not self._suffixes and not weight_format.may_be_absent:
            raise ConfigError(
                f"the weights cannot be {weight_format.name}: no linear layer has a tensor "
                f"*{' or *'.join(sorted(markers))}; the files do not belong together"
            )
        for prefix in self._others:
            self.shape_of(prefix)
        for name, prefix in self._prefix_of.items():
            shape, expected = self.shape_of(prefix), (linears[name].out_features, linears[name].in_features)
            if shape != expected:
                raise ConfigError(
                    f"{prefix[:200]} has {list(shape)} numbers, and config.json describes {list(expected)}; the files "
                    "do not belong together"
                )

    def class_like(self, model_class: Any) -> Any:
        """Return a subclass of a model's class whose linear layers with quantized matrices are made without them."""
        names, tied = list(self._prefix_of), self._tied

        class QuantizedModel(model_class):  # type: ignore[misc]
            """A model that is made without the quantized matrices."""

            def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
                super().__init__(config, *arguments, **options)
                for name in names:
                    linear = self.get_submodule(name)
                    self.set_submodule(name, QuantizedLinear(linear.in_features, linear.out_features, linear.bias))
                if tied is not None:
                    _tie(self, tied)

            @property
            def num_quantized_parameters(self) -> int:
                return num_quantized_parameters(self)

        # transformers compares the name with that in config.json, and renames weights only for classes of its own.
        QuantizedModel.__name__, QuantizedModel.__module__ = model_class.__name__, model_class.__module__
        return QuantizedModel

    def unquantized(self) -> dict[str, Lazy]:
        """Return the tensors that transformers reads, by name.

        Quantized matrices that no linear layer takes are among them, and are dequantized when they are read:
        transformers stacks the experts of a mixture in one parameter.
        """
        if self._others:
            log.warning(
                "%d quantized matrices are dequantized, because no linear layer takes them: %s, for example",
                len(self._others),
                self._others[0][:200],
            )
        of_matrices = {prefix + suffix for prefix, suffixes in self._suffixes.items() for suffix in suffixes}
        found = {name: self._source.lazy(name) for name in self._source.names() if name not in of_matrices}
        for prefix in self._others:
            found[prefix + self._format.parameter_suffix] = _Dequantized(self, prefix)
        return found

    def fill(
        self, model: nn.Module, cut: Callable[[QuantizedTensor, str], QuantizedTensor], progress: Progress
    ) -> None:
        """Read the matrices of the layers that were made without them, one after the other.

        `cut` takes this rank's part of the matrix of a layer, by the layer's name.
        """
        waiting = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
        # By itself, the C library does not return the memory that reading took, because codes that stay lie after it.
        with progress.over(f"reading weights: {self._format.name}", waiting, trim_heap) as counted:
            for name, module in counted:
                read = partial(self._read, self._prefix_of[name], name, cut)
                matrix = read()
                module.fill(matrix, read if self._is_read_again(matrix, name) else None)

    def _read(self, prefix: str, name: str, cut: Callable[[QuantizedTensor, str], QuantizedTensor]) -> QuantizedTensor:
        return cut(self._format.read(self._tensors(prefix), prefix), name)

    def _is_read_again(self, matrix: QuantizedTensor, name: str) -> bool:
        """Return whether the matrix is not kept until it is prepared: if it takes more memory than in the files.

        Codes of five and six bits take a byte each until a kernel stores them in as many bits. All matrices like this
        would be the peak of memory, so each is read twice more: for the self-check's sample, and when it is prepared.
        """
        is_looked_up = self._tied is not None and name == self._tied.head  # in each step, see QuantizedEmbedding
        prefix = self._prefix_of[name]
        num_outputs, num_inputs = self.shape_of(prefix)
        share = matrix.num_outputs * matrix.num_inputs / (num_outputs * num_inputs)  # of this rank
        num_file_bytes = share * sum(tensor.nbytes for tensor in self._tensors(prefix).values())
        return not is_looked_up and matrix.num_bytes > MOST_GROWTH * num_file_bytes

    def shape_of(self, prefix: str) -> tuple[int, ...]:
        return self._format.check(self._tensors(prefix), prefix)

    def dequantize(self, prefix: str) -> Tensor:
        return self._format.dequantize(self._tensors(prefix), prefix, self._dtype)

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        return {suffix: self._source.tensor(prefix + suffix) for suffix in self._suffixes[prefix]}


class _Dequantized:
    """A quantized matrix that is dequantized when it is read: a `Lazy`."""

    def __init__(self, matrices: QuantizedMatrices, prefix: str) -> None:
        self._matrices, self._prefix = matrices, prefix

    def get_shape(self) -> list[int]:
        return list(self._matrices.shape_of(self._prefix))

    def __getitem__(self, index: Any) -> Tensor:
        return self._matrices.dequantize(self._prefix)[index]


def read_quantized_weights(
    path: Path,
    config: Any,
    dtype: str | torch.dtype,
    attention: str,
    progress: Progress,
    weight_format: WeightFormat,
    architecture: str,
    ranks: Ranks | None = None,
) -> tuple[PreTrainedModel, int]:
    """Return the model in `path`, on the CPU, and the bytes of its weights there: this rank's part, if there are ranks.

    Raises ConfigError, SafetensorError, and various errors of transformers for files that are not a model.
    """
    source, described = _open(path, config)
    model = build_model(path, source, described, dtype, attention, progress, weight_format, architecture, ranks)
    return model, num_weight_bytes(model)


def _open(path: Path, config: Any) -> tuple[TensorSource, PreTrainedModel]:
    """Return the tensors of the files in `path`, and the model that they are for, without memory."""
    source: TensorSource
    if has_gguf(path):
        files, source = [path / GGUF], GgufFile(path)
    else:
        files = find_weights(path)
        source = TensorFiles(files)
    return source, check_extent(config, files, len(source.names()))


def build_model(
    path: Path,
    source: TensorSource,
    described: PreTrainedModel,
    dtype: str | torch.dtype,
    attention: str,
    progress: Progress,
    weight_format: WeightFormat,
    architecture: str,
    ranks: Ranks | None = None,
) -> PreTrainedModel:
    """Return a model with the weights that a source has for it. `described` is the model without memory.

    Raises ConfigError, which names `path`, if weights are missing.
    """
    config = described.config
    resolved = _resolve(dtype, config, source)
    matrices = QuantizedMatrices(source, weight_format, described, resolved, ranks)
    model_class = matrices.class_like(type(described))
    if ranks is not None:
        model_class = partial_class(config, architecture, ranks, model_class)
    with tensors_counted(progress):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=matrices.unquantized(),
            dtype=resolved,
            attn_implementation=attention,
            output_loading_info=True,
        )
    check_complete(report, path)
    model.name_or_path = str(path)
    group = None if ranks is None else ranks.group
    plan = None if group is None else TensorParallelPlan.of(model, architecture, group.size)

    def cut(matrix: QuantizedTensor, name: str) -> QuantizedTensor:
        return matrix if plan is None or group is None else local_matrix(matrix, name, plan, group)

    matrices.fill(model, cut, progress)
    checked: PreTrainedModel = model
    return checked


def quantize_weights(model: PreTrainedModel, weight_format: WeightFormat, progress: Progress) -> None:
    """Quantize the linear layers of a model that has its weights, such as random ones, one after the other."""
    linears = [(name, linear) for name, linear in _linears_of(model).items() if weight_format.takes(name)]
    with progress.over(f"quantizing weights: {weight_format.name}", linears, trim_heap) as counted:
        for name, linear in counted:
            quantized = QuantizedLinear(linear.in_features, linear.out_features, linear.bias)
            quantized.fill(weight_format.read({".weight": linear.weight.detach()}, name))
            model.set_submodule(name, quantized)
            del linear.weight  # which `linears` still refers to
    tied = _tied_of(model)
    if tied is not None:
        head = QuantizedLinear(tied.head_layer.in_features, tied.head_layer.out_features, tied.head_layer.bias)
        head.fill(weight_format.read({".weight": tied.head_layer.weight.detach()}, tied.head))
        model.set_submodule(tied.head, head)
        _tie(model, tied)


def num_quantized_parameters(model: nn.Module) -> int:
    """Return how many numbers the quantized matrices stand for, which no parameter of the model has."""
    return sum(module.num_numbers for module in _quantized(model))


def rounds_activations(model: nn.Module) -> bool:
    """Return whether the model has weights that are multiplied by activations of eight bits."""
    return any(module.rounds_activations for module in _quantized(model))


def num_weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the model's parameters and quantized matrices."""
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(
        module.num_bytes for module in _quantized(model)
    )


def _quantized(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def _linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that can have a matrix of their own: not those that are tied to the embedding."""
    tied = model.all_tied_weights_keys
    return {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and f"{name}.weight" not in tied
    }


@dataclass(frozen=True, slots=True)
class _Tied:
    """The names of an output head and of the embedding that has the same matrix."""

    head: str
    embedding: str
    head_layer: nn.Linear


def _tied_of(model: PreTrainedModel) -> _Tied | None:
    """Return the head and the embedding, if they are tied, and are the only parameters that are."""
    tied = model.all_tied_weights_keys
    if len(tied) != 1:
        return None
    modules = dict(model.named_modules())
    head_name, embedding_name = (name.removesuffix(".weight") for name in next(iter(tied.items())))
    head, embedding = modules.get(head_name), modules.get(embedding_name)
    # Some embeddings multiply the rows that they look up.
    if head is None or not is_plain_linear(head) or type(embedding) is not nn.Embedding:
        return None
    return _Tied(head_name, embedding_name, head)


def _tie(model: Any, tied: _Tied) -> None:
    """Let the embedding look up rows in the head's matrix."""
    embedding = model.get_submodule(tied.embedding)
    model.set_submodule(tied.embedding, QuantizedEmbedding(model.get_submodule(tied.head), embedding.weight.dtype))
    model.all_tied_weights_keys = {}  # or transformers would look for their parameters


def _name_of(prefix: str, linears: dict[str, nn.Linear], base: str) -> str | None:
    """Return the name of the linear layer that the files call `prefix`: some leave out the base model's name.

    Models with a part for images had their language part in other places before transformers 4.52.
    """
    former = prefix.replace("language_model.model.", "model.language_model.", 1).removeprefix("language_model.")
    inner = f"{base}.language_model.{prefix.removeprefix(f'{base}.')}"
    for name in (prefix, f"{base}.{prefix}", prefix.removeprefix(f"{base}."), former, inner):
        if name in linears:
            return name
    return None


def _resolve(dtype: str | torch.dtype, config: Any, source: TensorSource) -> torch.dtype:
    """Return the dtype of the model; `auto` is that of config.json, else that of the files' first numbers."""
    if isinstance(dtype, torch.dtype):
        return dtype
    known = config.get_text_config().dtype
    if isinstance(known, torch.dtype):
        return known
    dtypes = (source.tensor(name).dtype for name in source.names())
    return next((found for found in dtypes if found.is_floating_point and found.itemsize > 1), torch.bfloat16)
