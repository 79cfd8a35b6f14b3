"""Make bitsandbytes.safetensors: small matrices that bitsandbytes has quantized, and what it dequantizes them to.

Needs `pip install bitsandbytes`; 0.50 made the file. Run it as a module, from the root of the repository.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import save_file
from torch import Tensor

MADE = Path(__file__).with_name("bitsandbytes.safetensors")


def four_bits(
    kind: str, nested: bool = False, storage: torch.dtype = torch.uint8, shape: tuple[int, int] = (6, 128)
) -> dict[str, Tensor]:
    # Rows of very different size, so that a scale in the wrong place is seen.
    matrix = torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]
    packed, state = bnb.quantize_4bit(
        matrix, blocksize=64, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    tensors = {f".weight.{suffix}": tensor for suffix, tensor in state.as_dict(packed=True).items()}
    # The kernel for CPUs of 0.50 is wrong where a block ends within a row: its numbers differ from the matrix by 92 %.
    absmax = state.absmax
    if nested:
        absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    octets = packed.view(torch.uint8).reshape(-1)
    numbers = _dequantize_4bit_compute(octets, absmax, state.code, 64, state.shape, state.dtype)
    assert (numbers - matrix).norm() < 0.2 * matrix.norm()
    return tensors | {".weight": packed, ".dequantized": numbers}


def int8() -> dict[str, Tensor]:
    codes, scales, _ = bnb.int8_vectorwise_quant(torch.randn(5, 24).half())
    return {".weight": codes, ".SCB": scales, ".dequantized": bnb.int8_vectorwise_dequant(codes, scales).float()}


def main() -> None:
    torch.manual_seed(1)
    cases = {
        "nf4": four_bits("nf4"),
        "fp4": four_bits("fp4"),
        "nf4_nested": four_bits("nf4", nested=True, shape=(40, 512)),  # two blocks of scales
        "fp4_nested": four_bits("fp4", nested=True),
        "nf4_bfloat16_storage": four_bits("nf4", storage=torch.bfloat16),
        "nf4_odd": four_bits("nf4", shape=(6, 96)),  # blocks end within rows
        "int8": int8(),
    }
    tensors = {f"{case}{suffix}": tensor for case, made in cases.items() for suffix, tensor in made.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, MADE)


if __name__ == "__main__":
    main()
