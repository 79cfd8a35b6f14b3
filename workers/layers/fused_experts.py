"""A mixture of experts whose tokens are grouped by expert: the weights of an expert are read once in a step.

On a CPU with C kernels, steps of few tokens are one call of experts.c. In steps with many tokens, such as those of
prompts, oneDNN multiplies the tokens of one expert after the other.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.csrc.bindings import CExperts
from workers.layers.cpu_ops import C_GATES, CpuOps
from workers.layers.cpu_weight import CpuWeight
from workers.layers.layer_families import ExpertNames
from workers.layers.linear import LinearMethod, Weight, prepare

FLOAT_BYTES = 4


class FusedExperts:
    """The experts of one layer, and the router that chooses among them."""

    def __init__(self, layer: nn.Module, names: ExpertNames, method: LinearMethod, ops: CpuOps) -> None:
        """Take the weights of transformers' `layer`."""
        router: Any = layer.get_submodule(names.router)
        activation = names.activation_of(layer)
        assert activation is not None
        self._router = _copy_in_float32(router.weight)
        self._router_bias = _copy_in_float32(router.bias) if names.is_transposed else None
        self._num_chosen: int = router.top_k
        self._normalizes: bool = getattr(router, "norm_topk_prob", True)
        self._gate, self._scalar_bytes = ops.gate_of(activation), ops.scalar_bytes
        self._gate_up, self._down = _prepare_experts(layer.get_submodule(names.experts), names, method)
        self._shared: tuple[Weight, Weight] | None = None
        self._shared_router: Tensor | None = None
        if names.shared_expert is not None and names.shared_router is not None:
            shared: Any = layer.get_submodule(names.shared_expert)
            self._shared = prepare(method, shared.gate_proj, shared.up_proj), prepare(method, shared.down_proj)
            shared_router: Any = layer.get_submodule(names.shared_router)
            self._shared_router = _copy_in_float32(shared_router.weight)
        self._in_c = _make_struct(self, ops, activation)

    @property
    def cpu_weights(self) -> list[CpuWeight]:
        """The weights that C multiplies; none if it cannot multiply by one of them."""
        return [] if self._in_c is None else self._in_c.weights

    @property
    def workspace_scalars(self) -> int:
        """The memory that C needs for each token of a step, in numbers of the model's dtype."""
        assert self._in_c is not None
        return -(-int(self._in_c.struct.workspace_bytes) // self._scalar_bytes)

    @property
    def address(self) -> int | None:
        """The struct that C reads."""
        return None if self._in_c is None else ctypes.addressof(self._in_c.struct)

    def add(self, inputs: Tensor, x: Tensor) -> Tensor:
        """Return x + experts(inputs) for both [num_tokens, hidden_size]. `x` may be overwritten."""
        if self._in_c is not None and self._in_c.has_small_groups(len(x)):
            return self._in_c.add(inputs, x)
        shares, chosen = self._choose(inputs)
        sums = torch.zeros(x.shape, dtype=torch.float32)
        order = chosen.flatten().argsort(stable=True)
        rows = order // self._num_chosen
        gathered, shares = inputs[rows], shares.flatten()[order, None]
        counts = torch.bincount(chosen.flatten(), minlength=len(self._gate_up)).tolist()
        first = 0
        for gate_up, down, count in zip(self._gate_up, self._down, counts, strict=True):
            if count:
                part = slice(first, first + count)
                product = down.multiply(self._gate(gate_up.multiply(gathered[part])))
                sums.index_add_(0, rows[part], product.float() * shares[part])
            first += count
        if self._shared is not None and self._shared_router is not None:
            gate_up, down = self._shared
            share = torch.sigmoid(F.linear(inputs.float(), self._shared_router))
            sums += share * down.multiply(self._gate(gate_up.multiply(inputs))).float()
        return (x + sums).to(x.dtype)

    def _choose(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares and the numbers [num_tokens, num_chosen] of each token's experts."""
        scores = F.linear(inputs.float(), self._router, self._router_bias).softmax(dim=-1)
        shares, chosen = scores.topk(self._num_chosen, dim=-1)
        return (shares / shares.sum(dim=-1, keepdim=True) if self._normalizes else shares), chosen


class _InC:
    """What experts.c needs."""

    def __init__(self, library: ctypes.CDLL, struct: CExperts, weights: list[CpuWeight], keeps_alive: Any) -> None:
        self.struct, self.weights, self._keeps_alive = struct, weights, keeps_alive
        self._add_experts = library.add_experts
        self._gemm_workspace_bytes = max(weight.workspace_bytes for weight in weights)  # for each token

    def has_small_groups(self, num_tokens: int) -> bool:
        """Whether an expert gets so few tokens, on average, that C multiplies them at once."""
        struct = self.struct
        return bool(0 < num_tokens * struct.num_chosen <= struct.max_rows * struct.num_experts)

    def add(self, inputs: Tensor, x: Tensor) -> Tensor:
        """Add experts(inputs) to x [num_tokens, hidden_size], in place, and return it."""
        assert inputs.is_contiguous() and x.is_contiguous()
        workspace = torch.empty(len(x) * self.struct.workspace_bytes, dtype=torch.uint8)
        gemm_workspace = torch.empty(self.struct.max_rows * self._gemm_workspace_bytes, dtype=torch.uint8)
        self._add_experts(
            ctypes.addressof(self.struct),
            inputs.data_ptr(),
            x.data_ptr(),
            len(x),
            workspace.data_ptr(),
            gemm_workspace.data_ptr(),
        )
        return x


def _copy_in_float32(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True).contiguous()


def _prepare_experts(experts: Any, names: ExpertNames, method: LinearMethod) -> tuple[list[Weight], list[Weight]]:
    """Return the gate_up weights and the down weights, one of each for an expert."""
    gate_up_weights, down_weights = [], []
    for number in range(len(experts.gate_up_proj)):
        gate_up, down = experts.gate_up_proj.detach()[number], experts.down_proj.detach()[number]
        if not names.is_transposed:
            gate_up_weights.append(method(gate_up, None))
            down_weights.append(method(down, None))
            continue
        bias = experts.gate_up_proj_bias.detach()[number]
        gates_first = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1).T.contiguous()
        gate_up_weights.append(method(gates_first, torch.cat([bias[::2], bias[1::2]])))
        down_weights.append(method(down.T.contiguous(), experts.down_proj_bias.detach()[number].clone()))
    return gate_up_weights, down_weights


def _make_struct(experts: FusedExperts, ops: CpuOps, activation: str) -> _InC | None:
    """Return the experts as C computes them; None if it cannot multiply by one of their weights."""
    all_weights = (*experts._gate_up, *experts._down, *(experts._shared or ()))
    weights = [weight for weight in all_weights if isinstance(weight, CpuWeight)]
    num_experts, hidden_size = experts._router.shape
    if len(weights) != len(all_weights):
        return None
    gate_up, down = weights[:num_experts], weights[num_experts : 2 * num_experts]
    shared = weights[2 * num_experts :]  # gate_up and down, or nothing
    for first, second in zip((*gate_up, *shared[:1]), (*down, *shared[1:]), strict=True):
        first.prefetch_next(second)
    addresses = [(ctypes.c_void_p * num_experts)(*(weight.address for weight in group)) for group in (gate_up, down)]
    inner_size = max(weight.num_inputs for weight in (*down, *shared[1:]))
    scalar_bytes = ops.scalar_bytes
    numbers = hidden_size + num_experts + 2 * experts._num_chosen + 2  # see experts.c: float32 and int32 of a token
    struct = CExperts(
        router=experts._router.data_ptr(),
        router_bias=None if experts._router_bias is None else experts._router_bias.data_ptr(),
        gate_up=ctypes.addressof(addresses[0]),
        down=ctypes.addressof(addresses[1]),
        num_experts=num_experts,
        num_chosen=experts._num_chosen,
        normalizes=experts._normalizes,
        max_rows=min(weight.max_rows for weight in weights),
        gate=ctypes.cast(getattr(ops.library, C_GATES[activation]), ctypes.c_void_p).value,
        shared_gate_up=shared[0].address if shared else None,
        shared_down=shared[1].address if shared else None,
        shared_router=None if experts._shared_router is None else experts._shared_router.data_ptr(),
        workspace_bytes=FLOAT_BYTES * numbers + scalar_bytes * (2 * hidden_size + 3 * inner_size),
    )
    return _InC(ops.library, struct, weights, addresses)
