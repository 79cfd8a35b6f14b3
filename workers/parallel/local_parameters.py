"""Read only this rank's part of a model's weights, into a model with the usual modules and smaller parameters.

transformers reads a part of each tensor in a file where the model's parameter is a DTensor. So the model's class is
given placeholders of that kind before it is filled. Afterwards the parts become plain parameters: DTensors would cost a
dispatch for each operation, and no fused layer takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from servekit.errors import ConfigError
from workers.parallel.linear_parts import LinearParts
from workers.parallel.pipeline_stage import keep_stage
from workers.parallel.rank_group import RankGroup
from workers.parallel.ranks import Ranks
from workers.parallel.tensor_parallel_plan import CUTS_INPUTS, CUTS_OUTPUTS, TensorParallelPlan
from workers.quantization.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def partial_class(config: Any, architecture: str, ranks: Ranks, model_class: Any = None) -> type[PreTrainedModel]:
    """Return a subclass of the configuration's model, or of `model_class`, with the layers of this stage only.

    Its parameters are placeholders for this rank's parts.
    """
    model_class = model_class or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    class PartialModel(model_class):  # type: ignore[misc]
        """A model that is made with placeholders."""

        num_parameters_of_all_ranks = 0

        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            self.num_parameters_of_all_ranks = sum(
                parameter.numel()
                for name, parameter in self.named_parameters()
                if name not in self.all_tied_weights_keys  # they are tied after reading, and count once
            ) + getattr(self, "num_quantized_parameters", 0)
            if ranks.stage is not None:
                keep_stage(self, ranks.stage)
            group = ranks.group
            if group is None:
                return
            from torch.distributed.tensor import distribute_tensor

            plan = TensorParallelPlan.of(self, architecture, group.size)
            for name, parameter in list(self.named_parameters()):
                placement = _placement(plan.style_of_parameter(name), parameter, name)
                if placement is not None:
                    part = distribute_tensor(parameter, group.mesh, [placement], src_data_rank=None)
                    _set(self, name, part)

    # transformers compares the name with that in config.json, and renames weights only for classes of its own.
    PartialModel.__name__, PartialModel.__module__ = model_class.__name__, model_class.__module__
    return PartialModel


def _placement(style: str, parameter: Tensor, name: str) -> Placement | None:
    """Return how the parameter is cut; None if every rank holds all of it."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if style == "packed_colwise" and parameter.ndim > 1:
        return _StridedShard(parameter.ndim - 2, split_factor=2)  # gates and ups, each cut by itself
    if style in CUTS_OUTPUTS:
        return Shard(max(parameter.ndim - 2, 0))
    if style in CUTS_INPUTS and not name.endswith("bias"):
        return Shard(parameter.ndim - 1)
    return None


def use_local_parameters(model: PreTrainedModel, group: RankGroup, plan: TensorParallelPlan) -> None:
    """Replace each placeholder by the part it holds, and set the sizes of the layers that have become smaller."""
    from torch.distributed.tensor import DTensor

    # A tied parameter has two names, and stays one parameter.
    local: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(parameter, DTensor):
            key = id(parameter)
            local.setdefault(key, nn.Parameter(parameter.to_local().contiguous(), requires_grad=False))
            _set(model, name, local[key])
    for name, module in model.named_modules():
        if plan.is_selected(name):
            _select_heads(module, plan, group.rank)
            _count_groups(model.get_submodule(name.rpartition(".")[0]), plan, group.rank)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if plan.style_of(name).startswith("rowwise") and group.rank > 0 and getattr(module, "bias", None) is not None:
            module.bias = None  # rank 0 adds it, once


def local_matrix(matrix: QuantizedTensor, name: str, plan: TensorParallelPlan, group: RankGroup) -> QuantizedTensor:
    """Return this rank's part of the matrix of the linear layer `name`, a copy.

    Raises ConfigError where the parts of the inputs would divide groups that share a scale.
    """
    parts = LinearParts(plan, group)
    if (outputs := parts.outputs_of(name, matrix.num_outputs)) is not None:
        return matrix.take_outputs(outputs)
    if (share := parts.inputs_of(name, matrix.num_inputs)) is not None:
        try:
            return matrix.take_inputs(share.start, share.stop)
        except ValueError as error:
            raise ConfigError(
                f"{name} cannot be divided among {group.size} ranks (tensor_parallel_size): {error}; use another "
                "--tensor-parallel-size"
            ) from None
    return matrix


def _select_heads(projection: Any, plan: TensorParallelPlan, rank: int) -> None:
    """Keep the rows of the key-value heads that this rank's queries use."""
    heads = torch.tensor(plan.kv_heads_of(rank))
    for name, parameter in list(projection.named_parameters()):
        by_head = parameter.detach().unflatten(0, (plan.num_kv_heads, -1))
        projection._parameters[name] = nn.Parameter(by_head[heads].flatten(0, 1).contiguous(), requires_grad=False)


def _count_groups(attention: Any, plan: TensorParallelPlan, rank: int) -> None:
    """Set how many query heads use a key-value head, which transformers' own attention reads."""
    attention.num_key_value_groups = plan.num_heads // plan.size // len(plan.kv_heads_of(rank))


def _set(model: nn.Module, name: str, parameter: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    if not isinstance(parameter, nn.Parameter):
        parameter = nn.Parameter(parameter, requires_grad=False)
    model.get_submodule(owner)._parameters[leaf] = parameter
