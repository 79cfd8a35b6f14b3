"""Claims about reading weights of bitsandbytes, beside its own dequantization and the definition.

make_bitsandbytes.py has made bitsandbytes.safetensors with the library itself: matrices, and what it makes of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from servekit.errors import ConfigError
from tests.workers.quantization.formats.packing import NAME, read_checked
from workers.quantization.formats.bitsandbytes import FP4_LEVELS, Bitsandbytes
from workers.quantization.quantized_tensor import NF4_LEVELS

MADE = Path(__file__).with_name("bitsandbytes.safetensors")
LEVELS = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS}
FOUR_BITS = Bitsandbytes.from_config({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False})
EIGHT_BITS = Bitsandbytes.from_config({"quant_method": "bitsandbytes", "load_in_8bit": True})


def make(
    kind: str = "nf4", num_outputs: int = 6, num_inputs: int = 64, block_size: int = 64, seed: int = 0, **fields: Any
) -> dict[str, Tensor]:
    """Return the tensors of a random matrix of four bits; `fields` are set in its JSON."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_outputs * num_inputs // block_size)
    state = {"quant_type": kind, "blocksize": block_size, "dtype": "float16", "shape": [num_outputs, num_inputs]}
    encoded = json.dumps(state | fields).encode()
    return {
        ".weight": torch.randint(256, (num_outputs * num_inputs // 2, 1), generator=generator, dtype=torch.uint8),
        ".weight.absmax": torch.rand(num_blocks, generator=generator),
        ".weight.quant_map": torch.tensor(LEVELS[kind]),
        f".weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(encoded), dtype=torch.uint8),
    }


def make_int8() -> dict[str, Tensor]:
    return {".weight": torch.randint(-127, 128, (5, 24), dtype=torch.int8), ".SCB": torch.rand(5)}


def by_definition(tensors: dict[str, Tensor], levels: tuple[float, ...], absmax: list[float], state: Any) -> Tensor:
    numbers: list[float] = []
    for byte in tensors[".weight"].flatten().tolist():
        for code in (byte // 16, byte % 16):
            numbers.append(levels[code] * absmax[len(numbers) // state["blocksize"]])
    return torch.tensor(numbers).reshape(state["shape"])


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(["nf4", "fp4"]),
    num_outputs=st.integers(1, 9),
    sixteens_of_inputs=st.integers(1, 12),
    block_size=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 1000),
)
def test_each_number_is_the_level_of_its_code_times_the_largest_of_its_block(
    kind: str, num_outputs: int, sixteens_of_inputs: int, block_size: int, seed: int
) -> None:
    num_inputs = 16 * sixteens_of_inputs  # so blocks may end within a row
    tensors = make(kind, num_outputs, num_inputs, block_size, seed)
    state = {"blocksize": block_size, "shape": [num_outputs, num_inputs]}
    expected = by_definition(tensors, LEVELS[kind], tensors[".weight.absmax"].tolist(), state)
    torch.testing.assert_close(read_checked(FOUR_BITS, tensors), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["nf4", "fp4", "nf4_nested", "fp4_nested", "nf4_bfloat16_storage", "nf4_odd", "int8"])
def test_numbers_are_those_of_bitsandbytes(case: str) -> None:
    made = load_file(MADE)
    tensors = {name.removeprefix(case): made[name] for name in made if name.startswith(f"{case}.")}
    expected = tensors.pop(".dequantized")
    read = EIGHT_BITS if case == "int8" else FOUR_BITS
    torch.testing.assert_close(read_checked(read, tensors), expected, rtol=1e-6, atol=1e-9)


def test_rows_of_int8_have_one_scale_and_inputs_stay_numbers() -> None:
    tensors = make_int8()
    expected = tensors[".weight"].float() * tensors[".SCB"][:, None] / 127
    torch.testing.assert_close(read_checked(EIGHT_BITS, tensors), expected, rtol=1e-6, atol=0)
    read = EIGHT_BITS.read(tensors | {".weight_format": torch.tensor(0, dtype=torch.uint8)}, NAME)
    assert read.group_size == 24 and read.activations == "float"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_8bit = True"),
        ({"load_in_4bit": "yes"}, "load_in_4bit = 'yes'"),
        ({"load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight = True"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Bitsandbytes.from_config(config)
    assert reason in refusal.value.message and "bitsandbytes" in refusal.value.message


NESTED = {
    ".weight.absmax": torch.zeros(6, dtype=torch.uint8),
    ".weight.nested_absmax": torch.ones(1),
    ".weight.nested_quant_map": torch.linspace(-1, 1, 256),
}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (make() | {".weight.absmax": torch.full((6,), torch.nan)}, "not finite"),
        (make() | {".weight.absmax": torch.ones(7)}, "must be float32 [6]"),
        (make() | {".weight.quant_map": torch.full((16,), torch.nan)}, "a quant_map that is not the one of nf4"),
        (make() | {".weight.quant_map": torch.tensor(FP4_LEVELS)}, "a quant_map that is not the one of nf4"),
        (make() | {".weight": torch.zeros(191, 1, dtype=torch.uint8)}, "382 codes for the shape [6, 64]"),
        (make(shape=[1 << 40, 1 << 40]), "codes for the shape"),
        (make(shape=[-6, -64]), "shape [-6, -64]"),
        (make(shape=[6, 8, 8]), "cannot be read"),
        (make(blocksize=0), "blocksize 0"),
        (make(blocksize=1 << 9000), "blocksize 1"),
        (make(padding="x" * 5000), "bytes, and the limit is 4096"),
        (make() | {".weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}, "cannot be read"),
        (make() | make("fp4"), "the tensors of 2 formats"),
        (make() | {".SCB": torch.ones(6)}, "the tensors of 2 formats"),
        (make(num_inputs=24), "24 inputs and blocks of 64, so only 8 have the same scale"),
        (make() | NESTED, "nested_blocksize 0"),
        (make(nested_blocksize=256, nested_offset=1e300) | NESTED, "not finite"),
        (make(nested_blocksize=256, nested_offset=float("nan")) | NESTED, "cannot be read"),
        (make_int8() | {".weight_format": torch.tensor(2, dtype=torch.uint8)}, "weight_format 2"),
        (make_int8() | {".SCB": torch.ones(4)}, "[5]"),
        (make_int8() | {".SCB": torch.full((5,), torch.inf)}, "not finite"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused_in_a_sentence(tensors: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_checked(FOUR_BITS, tensors)
    assert reason in refusal.value.message and NAME in refusal.value.message
