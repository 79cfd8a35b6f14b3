"""Claims about written matrices: bytes are those of the package compressed-tensors, and our reader reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open

from workers.quantization.formats.compressed_tensors import CompressedTensors
from workers.quantization.formats.compressed_tensors_writing import describe, layout_of, pack_matrix
from workers.quantization.formats.registry import format_of
from workers.quantization.methods.grid import Grid, RoundedMatrix
from workers.quantization.methods.rtn import round_to_nearest
from workers.quantization.quantized_tensor import Activations, unpack_nibbles

# Made by compressed-tensors 0.20 itself; see make_samples.py beside it.
SAMPLES = Path(__file__).parent / "compressed_tensors_samples.safetensors"
WRITTEN = ["w4_group", "w4_group_asymmetric", "w4_channel", "w8_group", "w8_channel_asymmetric"]
WRITTEN += ["int8_channel", "fp8_channel"]

GRIDS: dict[str, tuple[Grid, Activations]] = {
    "w4a16": (Grid(4, group_size=16, scale_dtype=torch.bfloat16), "float"),
    "w4a16_asymmetric": (Grid(4, group_size=16, is_symmetric=False, scale_dtype=torch.float16), "float"),
    "w4a8": (Grid(4, group_size=16), "int8"),
    "w8a16": (Grid(8), "float"),
    "w8a16_asymmetric": (Grid(8, group_size=16, is_symmetric=False), "float"),
    "w8a8": (Grid(8), "int8"),
    "fp8": (Grid(8, is_float=True), "float8"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_bytes_are_those_of_the_formats_own_package(name: str) -> None:
    tensors = {key.removeprefix(name): value for key, value in load_file(SAMPLES).items() if key.startswith(f"{name}.")}
    expected = tensors.pop(".expected")
    with safe_open(SAMPLES, framework="pt") as file:
        fields: dict[str, Any] = json.loads(file.metadata()["schemes"])[name]
    group = {"targets": ["Linear"], "weights": fields}
    read = CompressedTensors.from_config({"config_groups": {"group_0": group}}).read(tensors, name)
    # The codes, as the reader knows them from the package's bytes, are written again.
    codes = (unpack_nibbles(read.codes).view(torch.int8) - 8) if read.encoding == "int4" else read.codes
    grid = Grid(
        fields["num_bits"],
        group_size=fields.get("group_size"),
        is_symmetric=fields.get("symmetric", True),
        is_float=fields.get("type") == "float",
        scale_dtype=tensors[".weight_scale"].dtype,
    )
    zero_points = None
    if read.offsets is not None:
        zero_points = (read.offsets / read.scales.float()).round().neg().to(torch.int8)
    matrix = RoundedMatrix(codes, tensors[".weight_scale"], zero_points)
    packed = pack_matrix(matrix, grid, layout_of(grid, "int8" if name == "int8_channel" else "float"))
    assert packed.keys() == tensors.keys()
    for suffix, tensor in tensors.items():
        assert packed[suffix].dtype is tensor.dtype and packed[suffix].shape == tensor.shape, suffix
        assert torch.equal(packed[suffix].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), suffix
    torch.testing.assert_close(matrix.dequantize(), expected.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("shape", [(24, 48), (20, 32)])
def test_the_reader_finds_the_numbers_that_were_written(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    grid, activations = GRIDS[name]
    matrix, layout = round_to_nearest(torch.randn(shape), grid), layout_of(grid, activations)
    weight_format = format_of(describe(layout, {"model.layers.0.a": grid}, activations, ["lm_head"]))
    tensors = pack_matrix(matrix, grid, layout)
    assert weight_format.check(tensors, "model.layers.0.a") == shape
    read = weight_format.read(tensors, "model.layers.0.a")
    torch.testing.assert_close(read.dequantize(), matrix.dequantize(), rtol=1e-6, atol=1e-6)
    assert read.activations == activations and read.group_size == (grid.group_size or shape[1])
    assert read.encoding == ("float8" if grid.is_float else f"int{grid.num_bits}")


def test_modules_of_another_group_size_are_targeted_by_their_names() -> None:
    grids = {f"model.layers.{layer}.{name}": Grid(4, group_size=32) for layer in range(3) for name in ("q", "up")}
    grids |= {f"model.layers.{layer}.down": Grid(4, group_size=16) for layer in range(3)}
    config = describe("pack-quantized", grids, "float", ["lm_head", "model.layers.0.gate", "model.layers.1.gate"])
    assert config["config_groups"]["group_0"]["targets"] == [
        r"re:model\.layers\.\d+\.q$",
        r"re:model\.layers\.\d+\.up$",
    ]
    assert config["config_groups"]["group_1"]["targets"] == [r"re:model\.layers\.\d+\.down$"]
    assert config["ignore"] == ["lm_head", r"re:model\.layers\.\d+\.gate$"]
    weight_format = format_of(config)
    for name, grid in grids.items():
        matrix = round_to_nearest(torch.randn(8, 64), grid)
        read = weight_format.read(pack_matrix(matrix, grid, "pack-quantized"), name)
        assert read.group_size == grid.group_size, name


def test_no_pattern_matches_a_module_that_is_not_meant() -> None:
    grids = {"layers.0.up": Grid(4, group_size=32), "layers.2.up": Grid(4, group_size=32)}
    grids["layers.1.up"] = Grid(4, group_size=16)
    config = describe("pack-quantized", grids, "float", ["layers.3.up"])
    assert config["config_groups"]["group_1"]["targets"] == ["layers.1.up"]
    assert config["ignore"] == ["layers.3.up"]
