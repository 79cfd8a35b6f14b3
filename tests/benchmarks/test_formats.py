"""Claims about benchmarks/formats.py: its checkpoints mean what they were made of, and its table has every format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks.formats import FORMATS, PAGE, matrices_of, num_bytes_of
from benchmarks.random_llama import SHAPE
from servekit.engine.model_files import DEMO_MODEL_PATH

LLAMA = matrices_of(LlamaConfig(**SHAPE))


def test_the_matrices_are_all_of_the_models_weights() -> None:
    assert sum(each.num_outputs * each.num_inputs for each in LLAMA) == 397_672_448
    demo = matrices_of(LlamaConfig.from_pretrained(DEMO_MODEL_PATH))
    stored = (DEMO_MODEL_PATH / "model.safetensors").stat().st_size
    assert num_bytes_of(demo, FORMATS["bfloat16"].bits, 64) == pytest.approx(stored, rel=0.002)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("bfloat16", 16), ("int8", 8.03), ("int4", 4.79), ("w8a8", 8.67), ("w4a16", 5.1), ("gptq", 5.13), ("q8_0", 8.5)],
)
def test_the_arithmetic_of_a_format_is_that_of_its_codes_and_scales(name: str, bits: float) -> None:
    num_weights = sum(each.num_outputs * each.num_inputs for each in LLAMA)
    assert 8 * num_bytes_of(LLAMA, FORMATS[name].bits, 128) / num_weights == pytest.approx(bits, abs=0.02)


def test_a_file_of_q4_k_m_has_about_as_many_bits_as_the_guides_say() -> None:
    """llama.cpp's guide gives 4.85 bits for large models. In small ones the head, of 6.56 bits, is a larger part."""
    num_weights = sum(each.num_outputs * each.num_inputs for each in LLAMA)
    assert 4.8 < 8 * num_bytes_of(LLAMA, FORMATS["q4_k_m"].bits, 128) / num_weights < 5.2


def test_the_page_has_a_place_for_each_table() -> None:
    for name in ("demo", "llama"):
        assert f"<!-- formats-{name}: made by python -m benchmarks.formats -->" in PAGE.read_text()


@pytest.mark.long
def test_a_trial_fills_a_row_for_each_format(tmp_path: Path) -> None:
    """One format of each kind is served, asked and evaluated: as it is, quantized at load, packed, and GGUF."""
    names = ["bfloat16", "int8", "gptq", "q4_k_m"]
    options = ["--quick", "--models", "demo", "--clients", "1", "2", "--directory", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.formats", *options, "--formats", *names]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200).stdout
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| ") and "clients" not in line]
    assert [cells[0].removeprefix("| ") for cells in rows] == [FORMATS[name].name for name in names]
    for cells in rows:
        assert all(cell.count(" / ") == 1 for cell in cells[1:5]), "a figure for each number of clients"
        assert float(cells[-1].split()[0]) > 80, "per cent of the questions are answered right"
        assert float(cells[-2]) < 20, "perplexity"
