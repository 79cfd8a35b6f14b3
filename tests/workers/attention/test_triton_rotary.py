"""The Triton rotation agrees with transformers' own functions in float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.support.triton_device import DEVICE, NAN, TOLERANCES, assert_same, random, triton_rotary
from tests.workers.attention.test_triton_kernels import assert_rounded
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, INT8_PAGES, QuantizedPages

rotate_and_store, LayerPages = triton_rotary.rotate_and_store, triton_rotary.LayerPages

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rotary_dim", "with_norms"),
    [(6, 64, 64, False), (2, 80, 80, True), (8, 128, 128, True), (4, 128, 96, True), (2, 64, 16, False)],
)
def test_queries_are_rotated_in_place_and_keys_in_their_pages(
    dtype: torch.dtype, num_heads: int, head_dim: int, rotary_dim: int, with_norms: bool
) -> None:
    """As transformers' own functions have it, in float64."""
    num_tokens, num_kv_heads, block_size, eps = 6, 2, 4, 1e-6
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = (10 * random(num_tokens, rotary_dim // 2)).repeat(1, 2)
    norms = [1 + random(head_dim, dtype=dtype) / 4 for _ in range(2)] if with_norms else [None, None]
    pages = torch.zeros(2, 3, block_size, num_kv_heads, head_dim, dtype=dtype, device=DEVICE)
    cells = torch.tensor([9, 2, -1, 11, 0, 5], device=DEVICE)

    heads = qkv.clone().unflatten(1, (-1, head_dim)).double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    normed = [
        each if norm is None else each * torch.rsqrt(each.square().mean(-1, keepdim=True) + eps) * norm.double()
        for each, norm in zip(heads, norms, strict=False)
    ]
    wide = angles.double()
    rotated = apply_rotary_pos_emb(
        *(each[..., :rotary_dim] for each in normed), wide.cos(), wide.sin(), unsqueeze_dim=1
    )
    queries, keys = (
        torch.cat([first, each[..., rotary_dim:]], dim=-1) for first, each in zip(rotated, normed, strict=True)
    )
    before = qkv.clone()
    rotate_and_store(
        qkv,
        num_heads,
        num_kv_heads,
        head_dim,
        wide.cos().float(),
        wide.sin().float(),
        *norms,
        eps,
        LayerPages(pages[0], pages[1]),
        cells,
    )
    assert_same(qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim)), queries)
    assert torch.equal(qkv[:, num_heads * head_dim :], before[:, num_heads * head_dim :])
    is_stored = cells >= 0
    assert_same(pages[0].flatten(0, 1)[cells[is_stored]], keys[is_stored])
    assert torch.equal(pages[1].flatten(0, 1)[cells[is_stored]].double(), heads[2][is_stored])
    assert (pages.flatten(1, 2)[:, [1, 3, 4, 6, 7, 8, 10]] == 0).all()


def test_keys_that_overflow_in_the_rotation_are_stored_as_zero() -> None:
    qkv = torch.full((2, 3 * 16), 60_000.0, dtype=torch.float16, device=DEVICE)
    qkv[0, -1] = NAN
    qkv[1, 24:32] *= -1
    pages = torch.full((2, 1, 4, 1, 16), 7.0, dtype=torch.float16, device=DEVICE)
    eighth_turn = torch.full((2, 16), 0.5**0.5, device=DEVICE)
    cells = torch.tensor([0, 2], device=DEVICE)
    rotate_and_store(qkv, 1, 1, 16, eighth_turn, eighth_turn, None, None, 0.0, LayerPages(pages[0], pages[1]), cells)
    assert (pages[0, 0, [0, 2]] == 0).all()  # one half is 60,000 (cos - sin) = 0, the other one overflows float16
    assert pages[1, 0, 0, 0].tolist() == [60_000.0] * 15 + [0.0]


@pytest.mark.parametrize("pages", [INT8_PAGES, FLOAT8_PAGES], ids=lambda pages: pages.name)
def test_rotated_keys_are_stored_as_codes_with_a_scale_that_fits_both_halves(pages: QuantizedPages) -> None:
    num_tokens, num_kv_heads, head_dim = 5, 2, 80
    qkv = random(num_tokens, 4 * num_kv_heads * head_dim)
    angles = (10 * random(num_tokens, head_dim // 2)).repeat(1, 2)
    keys, values = qkv.clone().unflatten(1, (-1, head_dim)).split([3 * num_kv_heads, num_kv_heads], dim=1)
    keys = keys[:, 2 * num_kv_heads :].double()
    keys, _ = apply_rotary_pos_emb(keys, keys, angles.double().cos(), angles.double().sin(), unsqueeze_dim=1)
    codes = torch.zeros(2, 3, 4, num_kv_heads, head_dim, dtype=torch.uint8, device=DEVICE).view(pages.code_dtype)
    scales, cells = torch.zeros(2, 3, 4, num_kv_heads, device=DEVICE), torch.tensor([9, 2, -1, 11, 0], device=DEVICE)
    rotate_and_store(
        qkv,
        2 * num_kv_heads,
        num_kv_heads,
        head_dim,
        angles.cos(),
        angles.sin(),
        None,
        None,
        0.0,
        LayerPages(*codes, *scales),
        cells,
    )
    is_stored = cells >= 0
    for vectors, found, of_vectors in zip((keys, values.double()), codes, scales, strict=True):
        exact = vectors[is_stored]
        assert_rounded(pages, (found.float() * of_vectors[..., None]).flatten(0, 1)[cells[is_stored]], exact)
        assert (of_vectors.flatten(0, 1)[[1, 3, 4, 5, 6, 7, 8, 10]] == 0).all()
