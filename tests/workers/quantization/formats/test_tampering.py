"""Claim: whatever a file holds, a format reads a matrix of the shape that it said, or refuses it with a ConfigError."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from servekit.errors import ConfigError
from tests.workers.quantization.formats import test_awq, test_bitsandbytes, test_fp8, test_gptq, test_mxfp4
from tests.workers.quantization.formats.packing import NAME
from workers.quantization.formats.interface import WeightFormat

SOUND: dict[str, tuple[WeightFormat, dict[str, Tensor]]] = {
    "gptq": (test_gptq.format_of(), test_gptq.make()[0]),
    "gptq with desc_act": (test_gptq.format_of(desc_act=True), test_gptq.make(has_desc_act=True)[0]),
    "gptq of 8 bits": (test_gptq.format_of(bits=8, group_size=-1), test_gptq.make(8, num_groups=1)[0]),
    "awq": (test_awq.format_of(), test_awq.make()[0]),
    "fp8 by block": (test_fp8.format_of(weight_block_size=[32, 32]), test_fp8.make()),
    "fp8": (test_fp8.format_of(), {".weight": test_fp8.make()[".weight"], ".weight_scale": torch.tensor(1.0)}),
    "nf4": (test_bitsandbytes.FOUR_BITS, test_bitsandbytes.make()),
    "nf4, nested": (
        test_bitsandbytes.FOUR_BITS,
        test_bitsandbytes.make(nested_blocksize=256, nested_offset=0.5) | test_bitsandbytes.NESTED,
    ),
    "int8": (test_bitsandbytes.EIGHT_BITS, test_bitsandbytes.make_int8()),
    "mxfp4": (test_mxfp4.FORMAT, test_mxfp4.make()),
}
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn)
SEEDS = range(150)


def tampered(tensors: dict[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    """Change one to three things about the tensors."""
    tensors = dict(tensors)
    for _ in range(draw.randint(1, 3)):
        suffix = draw.choice(sorted(tensors))
        tensor = tensors[suffix]
        match draw.randrange(7):
            case 0 if len(tensors) > 1:
                del tensors[suffix]
            case 1:
                tensors[suffix] = tensor.float().to(draw.choice(DTYPES))
            case 2:
                tensors[suffix] = torch.cat([tensor, tensor]) if tensor.ndim else tensor[None]
            case 3:
                tensors[suffix] = tensor[..., : draw.randint(0, tensor.shape[-1])] if tensor.ndim else tensor.repeat(2)
            case 4:
                tensors[suffix] = tensor.transpose(0, -1).contiguous() if tensor.ndim > 1 else tensor[..., None]
            case 5:
                tensors[suffix] = with_random_bytes(tensor, draw)
            case _:
                extreme = draw.choice([0, -1, 1, 255, 2**31 - 1, -(2**31), float("nan"), float("inf")])
                if tensor.dtype.is_floating_point or abs(extreme) <= 127:  # nan is not
                    tensors[suffix] = torch.full(tensor.shape, extreme).to(tensor.dtype)
    return tensors


def with_random_bytes(tensor: Tensor, draw: random.Random) -> Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    octets = changed.reshape(-1).view(torch.uint8)
    for _ in range(min(draw.randint(1, 8), len(octets))):
        octets[draw.randrange(len(octets))] = draw.randrange(256)
    return changed


def is_read(weight_format: WeightFormat, tensors: dict[str, Tensor]) -> bool:
    """Return whether a format reads the tensors. Any error but ConfigError is the test's failure."""
    try:
        shape = weight_format.check(tensors, NAME)
        assert weight_format.dequantize(tensors, NAME, torch.float32).shape == shape
        if len(shape) == 2:
            assert weight_format.read(tensors, NAME).dequantize().shape == shape
    except ConfigError as error:
        message = error.message
    else:
        return True
    assert NAME in message and "\n" not in message and len(message) < 400
    return False


@pytest.mark.parametrize("case", SOUND)
def test_tampered_tensors_are_read_in_their_shape_or_refused(case: str) -> None:
    weight_format, tensors = SOUND[case]
    assert is_read(weight_format, tensors)
    read = [is_read(weight_format, tampered(tensors, random.Random(f"{case} {seed}"))) for seed in SEEDS]
    assert any(read) and not all(read)
