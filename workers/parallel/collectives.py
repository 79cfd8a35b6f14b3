"""Add the collective operations of tensor parallelism to a model, as hooks at the modules that the plan names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workers.parallel.pipeline_stage import PassOn, Zeros
from workers.parallel.rank_group import RankGroup
from workers.parallel.tensor_parallel_plan import TensorParallelPlan

SUMS_OUTPUTS = {"rowwise", "rowwise_split_input", "moe_tp_experts", "all_reduce"}


def add_collectives(model: nn.Module, plan: TensorParallelPlan, group: RankGroup) -> list[RemovableHandle]:
    """Add hooks to the model's modules, and return their handles. Call it on all ranks."""
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if isinstance(module, PassOn | Zeros):
            continue  # another stage computes this module
        style = plan.style_of(name)
        if style == "rowwise_split_input":
            handles.append(module.register_forward_pre_hook(_take_share(group)))
        if style in SUMS_OUTPUTS:
            handles.append(module.register_forward_hook(lambda _, __, output: group.all_reduce(output)))
        elif style == "colwise_gather_output":
            handles.append(module.register_forward_hook(_gather(group, group.total(int(module.out_features)))))
        elif style == "embedding_rowwise":
            handles += _look_up_in_parts(module, group)
        elif style == "embedding_colwise":
            handles.append(module.register_forward_hook(_gather(group, group.total(module.weight.shape[1]))))
    return handles


@contextmanager
def with_collectives(model: nn.Module, plan: TensorParallelPlan | None, group: RankGroup | None) -> Iterator[None]:
    """Add the collectives within the context, if there is a group."""
    handles = [] if group is None or plan is None else add_collectives(model, plan, group)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _take_share(group: RankGroup) -> Any:
    """Return a hook that keeps this rank's share of the input's last dimension."""

    def take(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = arguments
        return (x[..., group.share(x.shape[-1])], *others)

    return take


def _gather(group: RankGroup, num_columns: int) -> Any:
    """Return a hook that puts the ranks' parts of the output side by side."""
    return lambda _, __, output: group.all_gather(output, num_columns)


def _look_up_in_parts(embedding: Any, group: RankGroup) -> list[RemovableHandle]:
    """Let each rank look up the tokens of its part of the vocabulary, and add up what they find."""
    num_rows = int(embedding.weight.shape[0])
    first = group.share(group.total(num_rows)).start
    is_here: list[Tensor] = []  # of one call, from its beginning to its end

    def before(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = arguments[0] - first
        is_here.append((rows >= 0) & (rows < num_rows))
        return (rows.where(is_here[0], 0), *arguments[1:])

    def after(_: nn.Module, __: Any, found: Tensor) -> Tensor:
        return group.all_reduce(found * is_here.pop()[..., None])

    return [embedding.register_forward_pre_hook(before), embedding.register_forward_hook(after)]
