"""The operations between the matrix products of a layer, in Triton. Each is one kernel that reads its input once.

In torch, a norm alone is half a dozen kernels, and in a decode step each of them takes longer to launch than to run.
Everything is computed in float32 and rounded once, when it is stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# Kernels are in Triton's language, for which mypy has no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SWIGLU_TILE = 1024


@triton.jit
def _add_norm_kernel(
    residual, delta, weight, normed, residual_stride, delta_stride, normed_stride, eps,
    size: tl.constexpr, padded_size: tl.constexpr,
):  # fmt: skip
    """Norm one token. With `delta`, residual is read and written in place.

    If padded_size is less than the number of threads, threads of several warps hold the same number, and one may read
    what another has already written. With `delta`, hidden sizes must therefore be 65 or more (4 warps have 128
    threads); every model's are. The fused layers pass no delta today.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_size)
    inside = columns < size
    pointers = residual + token * residual_stride + columns
    values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        values += tl.load(delta + token * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(pointers, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    result = values * factor * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + token * normed_stride + columns, result.to(normed.dtype.element_ty), mask=inside)


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `residual` [num_tokens, hidden_size] in place, and return the RMSNorm of the rounded sum.

    If `delta` is None, nothing is added. weight: [hidden_size]; models that multiply by 1 + weight pass 1 + weight.
    Zhang and Sennrich, "Root mean square layer normalization", 2019, section 4.
    """
    num_tokens, size = residual.shape
    assert residual.stride(1) == 1 and (delta is None or (delta.shape == residual.shape and delta.stride(1) == 1))
    assert weight.shape == (size,) and weight.is_contiguous()
    normed = torch.empty((num_tokens, size), dtype=residual.dtype, device=residual.device)
    if num_tokens:
        _add_norm_kernel[(num_tokens,)](
            residual,
            delta,
            weight,
            normed,
            residual.stride(0),
            0 if delta is None else delta.stride(0),
            size,
            eps,
            size,
            triton.next_power_of_2(size),
            num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
        )
    return normed


@triton.jit
def _swiglu_kernel(
    gate_up, output, gate_up_stride, output_stride, inner_size: tl.constexpr, tile_size: tl.constexpr,
    is_gelu: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile_size + tl.arange(0, tile_size)
    inside = columns < inner_size
    pointers = gate_up + token * gate_up_stride + columns
    gate = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pointers + inner_size, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if is_gelu:  # (1 + tanh(t)) / 2 = sigmoid(2 t), with t = sqrt(2 / pi) (gate + 0.044715 gate^3)
        slope = gate * (1.59576912 + 0.0713548163 * gate * gate)
    result = gate * tl.sigmoid(slope) * up
    tl.store(output + token * output_stride + columns, result.to(output.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [num_tokens, inner_size], for [num_tokens, 2 * inner_size] with the gates first.

    Shazeer, "GLU variants improve transformer", 2020, section 2.
    """
    return _gate(gate_up, is_gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up [num_tokens, inner_size], approximated by tanh, for gates and ups as those of swiglu.

    Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2.
    """
    return _gate(gate_up, is_gelu=True)


def _gate(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num_tokens, inner_size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * inner_size and gate_up.stride(1) == 1
    output = torch.empty((num_tokens, inner_size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _swiglu_kernel[(num_tokens, triton.cdiv(inner_size, SWIGLU_TILE))](
            gate_up, output, gate_up.stride(0), inner_size, inner_size, SWIGLU_TILE, is_gelu, num_warps=4
        )
    return output


class TritonOps:
    """The operations as `FusedDecoder` calls them."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return x / rms(x) * weight, for x [num_tokens, size]."""
        return add_norm(x, None, weight, epsilon)

    def norm_add(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> Tensor:
        """Return residual + x / rms(x) * weight, which is written into `residual`."""
        return residual.add_(add_norm(x, None, weight, epsilon))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [num_tokens, size], for [num_tokens, 2 * size] with the gates first."""
        return swiglu(gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, approximated by tanh."""
        return geglu(gate_up)
