"""Scales of two levels stand for exact products, and parts of them for the same ones."""

from __future__ import annotations

import torch

from tests.support.quantized import random_two_levels
from workers.quantization.two_level_scales import TwoLevelScales

torch.manual_seed(0)


def test_products_are_exact() -> None:
    scales = random_two_levels(5, 12, 4)
    assert (scales.shape, scales.super_block_groups) == ((5, 12), 4)
    exact = scales.factors.double() * scales.super_scales.double().repeat_interleave(4, dim=1)
    assert torch.equal(scales.float().double(), exact)


def test_whole_super_blocks_stay_of_two_levels_and_others_become_plain() -> None:
    scales = random_two_levels(5, 12, 4)
    whole, cut = scales.take_groups(slice(4, 12)), scales.take_groups(slice(2, 6))
    assert isinstance(whole, TwoLevelScales) and whole.super_block_groups == 4
    assert torch.equal(whole.float(), scales.float()[:, 4:])
    assert isinstance(cut, torch.Tensor) and torch.equal(cut, scales.float()[:, 2:6])


def test_zeros_have_the_same_shape() -> None:
    zeros = random_two_levels(5, 12, 4).zeros()
    assert zeros.shape == (5, 12) and not zeros.float().any()
