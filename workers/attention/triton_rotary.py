"""Rotate queries and keys, and store keys and values in their pages: one Triton kernel.

Everything is computed in float32 and rounded once, when it is stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# Kernels are in Triton's language, for which mypy has no types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.attention.triton_kernels import LayerPages, finite_or_zero, scale_of, to_codes, to_page


@triton.jit
def _norm_halves(first, second, weight, first_dims, second_dims, inside, eps, half_dim: tl.constexpr):
    """RMSNorm of heads, given as two halves of their dimensions, [num_heads, half_dim] each."""
    square_sum = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    factor = tl.rsqrt(square_sum / (2 * half_dim) + eps)[:, None]
    first_weight = tl.load(weight + first_dims, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + second_dims, mask=inside, other=0.0).to(tl.float32)
    return first * factor * first_weight, second * factor * second_weight


@triton.jit
def _store_halves(
    first, second, pages, scales, given_scales, block, offset, kv_head, first_dims, second_dims, inside,
    page_block_stride, page_offset_stride, page_head_stride, scale_block_stride, num_kv_heads: tl.constexpr,
):  # fmt: skip
    """Store one head's vector, given as two halves of its dimensions, [1, half_dim] each."""
    dtype: tl.constexpr = pages.dtype.element_ty
    targets = pages + block * page_block_stride + offset * page_offset_stride + kv_head * page_head_stride
    if scales is None:
        tl.store(targets + first_dims, to_page(first, dtype), mask=inside)
        tl.store(targets + second_dims, to_page(second, dtype), mask=inside)
    else:
        first, second = finite_or_zero(first), finite_or_zero(second)
        if given_scales is None:
            scale = scale_of(tl.max(tl.maximum(tl.abs(first), tl.abs(second))), dtype)
        else:
            scale = tl.load(given_scales + kv_head)
        tl.store(targets + first_dims, to_codes(first, scale, dtype), mask=inside)
        tl.store(targets + second_dims, to_codes(second, scale, dtype), mask=inside)
        tl.store(scales + block * scale_block_stride + offset * num_kv_heads + kv_head, scale)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_and_store_kernel(
    qkv, cosine, sine, query_norm, key_norm, key_pages, value_pages, key_scales, value_scales, given_key_scales,
    given_value_scales, slot_mapping, eps, qkv_stride, cosine_stride, sine_stride,
    key_block_stride, key_offset_stride, key_head_stride,
    value_block_stride, value_offset_stride, value_head_stride, key_scale_stride, value_scale_stride,
    num_kv_heads: tl.constexpr, group_size: tl.constexpr, padded_group: tl.constexpr, half_dim: tl.constexpr,
    padded_half: tl.constexpr, block_size: tl.constexpr, rotary_half: tl.constexpr,
):  # fmt: skip
    """Rotate and store one key head of one token, and rotate the query heads that share it.

    Dimension i is rotated with i + rotary_half; the dimensions from 2 * rotary_half on are pairs that are not rotated.
    """
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, padded_half)[None, :]
    inside = dims < half_dim
    if rotary_half == half_dim:
        first_dims, second_dims, is_rotated = dims, dims + half_dim, inside
    else:
        is_rotated = dims < rotary_half
        first_dims = tl.where(is_rotated, dims, dims + rotary_half)
        second_dims = tl.where(is_rotated, dims + rotary_half, dims + half_dim)
    cos = tl.load(cosine + token * cosine_stride + dims, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sine + token * sine_stride + dims, mask=is_rotated, other=0.0).to(tl.float32)

    members = tl.arange(0, padded_group)[:, None]
    is_member = inside & (members < group_size)
    heads = qkv + token * qkv_stride + (kv_head * group_size + members) * (2 * half_dim)
    first = tl.load(heads + first_dims, mask=is_member, other=0.0).to(tl.float32)
    second = tl.load(heads + second_dims, mask=is_member, other=0.0).to(tl.float32)
    if query_norm is not None:
        first, second = _norm_halves(first, second, query_norm, first_dims, second_dims, inside, eps, half_dim)
    tl.store(heads + first_dims, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=is_member)
    tl.store(heads + second_dims, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=is_member)

    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    key_head = qkv + token * qkv_stride + (group_size * num_kv_heads + kv_head) * (2 * half_dim)
    first = tl.load(key_head + first_dims, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(key_head + second_dims, mask=inside, other=0.0).to(tl.float32)
    if key_norm is not None:
        first, second = _norm_halves(first, second, key_norm, first_dims, second_dims, inside, eps, half_dim)
    _store_halves(
        first * cos - second * sin, second * cos + first * sin, key_pages, key_scales, given_key_scales, block, offset,
        kv_head, first_dims, second_dims, inside, key_block_stride, key_offset_stride, key_head_stride,
        key_scale_stride, num_kv_heads,
    )  # fmt: skip

    value_head = key_head + num_kv_heads * (2 * half_dim)
    first = tl.load(value_head + first_dims, mask=inside, other=0.0)
    second = tl.load(value_head + second_dims, mask=inside, other=0.0)
    _store_halves(
        first, second, value_pages, value_scales, given_value_scales, block, offset, kv_head, first_dims, second_dims,
        inside, value_block_stride, value_offset_stride, value_head_stride, value_scale_stride, num_kv_heads,
    )  # fmt: skip


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
    pages: LayerPages,
    slot_mapping: Tensor,
) -> None:
    """Rotate the queries of a QKV product in place, and store its rotated keys and its values in their pages.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]. Its keys and values are not changed; the slots of
    their pages are in `slot_mapping` (see `triton_kernels.store`). query_norm, key_norm: [head_dim] weights of an
    RMSNorm of each head before the rotation, or None. cosine, sine: [num_tokens, rotary_dim], both halves alike:
    dimension i is rotated with i + rotary_dim / 2. Su et al., "RoFormer", 2021, section 3.2.
    """
    num_tokens, half_dim = qkv.shape[0], head_dim // 2
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and head_dim % 2 == 0 and qkv.stride(1) == 1
    rotary_half = cosine.shape[1] // 2
    assert cosine.shape == sine.shape == (num_tokens, 2 * rotary_half) and rotary_half <= half_dim
    assert cosine.stride(1) == sine.stride(1) == 1
    assert pages.keys.shape[2:] == pages.values.shape[2:] == (num_kv_heads, head_dim)
    assert slot_mapping.is_contiguous()
    if num_tokens == 0:
        return
    group_size = num_heads // num_kv_heads
    padded_group, padded_half = triton.next_power_of_2(group_size), triton.next_power_of_2(half_dim)
    _rotate_and_store_kernel[(num_tokens, num_kv_heads)](
        qkv, cosine, sine, query_norm, key_norm, pages.keys, pages.values, pages.key_scales, pages.value_scales,
        pages.given_key_scales, pages.given_value_scales, slot_mapping, eps, qkv.stride(0), cosine.stride(0),
        sine.stride(0), *pages.keys.stride()[:3], *pages.values.stride()[:3], *pages.scale_strides,
        num_kv_heads, group_size, padded_group, half_dim, padded_half, pages.keys.shape[1], rotary_half,
        num_warps=1 if padded_group * padded_half <= 512 else 4,
    )  # fmt: skip
