"""What stands between the matrix products of a layer, in Triton: each piece is one kernel that reads its input once.

Left to torch, a norm alone is half a dozen kernels, and in a decode step each of them takes longer to start than to
run. Everything is computed in float32 and rounded once, where it is stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# Kernels are Triton's language, which has no types that mypy knows.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.triton_attention import to_page

SWIGLU_TILE = 1024


@triton.jit
def _add_norm_kernel(
    residual, delta, weight, normed, residual_stride, delta_stride, normed_stride, eps,
    size: tl.constexpr, padded_size: tl.constexpr,
):  # fmt: skip
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
    """Add `delta` to `residual` [num_tokens, hidden_size] in place; return the RMSNorm of the sum, as it was rounded.

    `delta` None adds nothing. `weight` is [hidden_size]; for a model that multiplies by 1 + weight, it is that. Zhang
    and Sennrich, "Root mean square layer normalization", 2019, section 4.
    """
    num_tokens, size = residual.shape
    assert residual.stride(1) == 1 and (delta is None or (delta.shape == residual.shape and delta.stride(1) == 1))
    assert weight.shape == (size,) and weight.is_contiguous()
    normed = torch.empty((num_tokens, size), dtype=residual.dtype, device=residual.device)
    if num_tokens:
        _add_norm_kernel[(num_tokens,)](
            *(residual, delta, weight, normed, residual.stride(0), 0 if delta is None else delta.stride(0), size, eps),
            *(size, triton.next_power_of_2(size)),
            num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
        )
    return normed


@triton.jit
def _normed(first, second, weight, dims, inside, eps, half_dim: tl.constexpr):
    """RMSNorm of heads [num_heads, half_dim] twice, the two halves of their dimensions."""
    square_sum = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    factor = tl.rsqrt(square_sum / (2 * half_dim) + eps)[:, None]
    first_weight = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + half_dim + dims, mask=inside, other=0.0).to(tl.float32)
    return first * factor * first_weight, second * factor * second_weight


@triton.jit
def _rotate_and_store_kernel(
    qkv, cosine, sine, query_norm, key_norm, key_pages, value_pages, slot_mapping, eps, key_scale, value_scale,
    qkv_stride, cosine_stride, sine_stride, key_block_stride, key_place_stride, key_head_stride,
    value_block_stride, value_place_stride, value_head_stride,
    num_kv_heads: tl.constexpr, group_size: tl.constexpr, padded_group: tl.constexpr, half_dim: tl.constexpr,
    padded_half: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """One program for each token and key head, with the query heads that share it."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, padded_half)[None, :]
    inside = dims < half_dim
    cos = tl.load(cosine + token * cosine_stride + dims, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sine + token * sine_stride + dims, mask=inside, other=0.0).to(tl.float32)

    members = tl.arange(0, padded_group)[:, None]
    is_member = inside & (members < group_size)
    first_pointers = qkv + token * qkv_stride + (kv_head * group_size + members) * (2 * half_dim) + dims
    first = tl.load(first_pointers, mask=is_member, other=0.0).to(tl.float32)
    second = tl.load(first_pointers + half_dim, mask=is_member, other=0.0).to(tl.float32)
    if query_norm is not None:
        first, second = _normed(first, second, query_norm, dims, inside, eps, half_dim)
    tl.store(first_pointers, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=is_member)
    tl.store(first_pointers + half_dim, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=is_member)

    cell = tl.load(slot_mapping + token)
    if cell < 0:
        return
    block, place = cell // block_size, cell % block_size
    key_head = (group_size * num_kv_heads + kv_head) * (2 * half_dim)
    first_pointers = qkv + token * qkv_stride + key_head + dims
    first = tl.load(first_pointers, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_pointers + half_dim, mask=inside, other=0.0).to(tl.float32)
    if key_norm is not None:
        first, second = _normed(first, second, key_norm, dims, inside, eps, half_dim)
    targets = key_pages + block * key_block_stride + place * key_place_stride + kv_head * key_head_stride + dims
    dtype: tl.constexpr = key_pages.dtype.element_ty
    tl.store(targets, to_page(first * cos - second * sin, dtype, key_scale), mask=inside)
    tl.store(targets + half_dim, to_page(second * cos + first * sin, dtype, key_scale), mask=inside)

    first_pointers += num_kv_heads * (2 * half_dim)
    targets = value_pages + block * value_block_stride + place * value_place_stride + kv_head * value_head_stride + dims
    first = tl.load(first_pointers, mask=inside, other=0.0)
    second = tl.load(first_pointers + half_dim, mask=inside, other=0.0)
    tl.store(targets, to_page(first, value_pages.dtype.element_ty, value_scale), mask=inside)
    tl.store(targets + half_dim, to_page(second, value_pages.dtype.element_ty, value_scale), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cosine: Tensor,
    sine: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """From a layer's queries, keys and values side by side to what attention reads.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]. Queries are rotated in place; keys are rotated and
    go with the values into the pages, where `slot_mapping` says (see `triton_attention.store`); in `qkv` they stay as
    they were. query_norm, key_norm: [head_dim] weights of an RMSNorm of each head before it is rotated. cosine, sine:
    [num_tokens, head_dim], both halves alike: dimension i is rotated with i + head_dim / 2. Su et al., "RoFormer",
    2021, section 3.2.
    """
    num_tokens, half_dim = qkv.shape[0], head_dim // 2
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and head_dim % 2 == 0 and qkv.stride(1) == 1
    assert cosine.shape == sine.shape == (num_tokens, head_dim) and cosine.stride(1) == sine.stride(1) == 1
    assert key_pages.shape[2:] == value_pages.shape[2:] == (num_kv_heads, head_dim)
    assert key_pages.stride(-1) == value_pages.stride(-1) == 1 and slot_mapping.is_contiguous()
    if num_tokens == 0:
        return
    group_size = num_heads // num_kv_heads
    padded_group, padded_half = triton.next_power_of_2(group_size), triton.next_power_of_2(half_dim)
    _rotate_and_store_kernel[(num_tokens, num_kv_heads)](
        *(qkv, cosine, sine, query_norm, key_norm, key_pages, value_pages, slot_mapping, eps, key_scale, value_scale),
        *(qkv.stride(0), cosine.stride(0), sine.stride(0), *key_pages.stride()[:3], *value_pages.stride()[:3]),
        *(num_kv_heads, group_size, padded_group, half_dim, padded_half, key_pages.shape[1]),
        num_warps=1 if padded_group * padded_half <= 512 else 4,
    )


@triton.jit
def _swiglu_kernel(
    gate_up, output, gate_up_stride, output_stride, inner_size: tl.constexpr, tile_size: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile_size + tl.arange(0, tile_size)
    inside = columns < inner_size
    pointers = gate_up + token * gate_up_stride + columns
    gate = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pointers + inner_size, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(output + token * output_stride + columns, result.to(output.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [num_tokens, inner_size], for [num_tokens, 2 * inner_size], the gate first.

    Shazeer, "GLU variants improve transformer", 2020, section 2.
    """
    num_tokens, inner_size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * inner_size and gate_up.stride(1) == 1
    output = torch.empty((num_tokens, inner_size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _swiglu_kernel[(num_tokens, triton.cdiv(inner_size, SWIGLU_TILE))](
            *(gate_up, output, gate_up.stride(0), inner_size, inner_size, SWIGLU_TILE), num_warps=4
        )
    return output
