"""Claims about checkpoints of `servekit quantize`: the package compressed-tensors and transformers read them as we do.

The package is no dependency of the tests, because it takes ten seconds to import. `pip install compressed-tensors`
makes these tests run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.quantize_command import demo_documents, make_model_with_tokenizer, quantize, read, write_texts
from workers.layers.quantized_linear import QuantizedLinear

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("compressed_tensors") is None, reason="needs pip install compressed-tensors"
    ),
]

TOKENS = torch.arange(3, 43)[None]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gptq", {"group_size": 16}),
    ("gptq", {"group_size": 48, "is_symmetric": True}),  # which does not divide every row
    ("awq", {"group_size": 16, "is_symmetric": True}),
    ("rtn", {"scheme": "w8a16"}),
    ("rtn", {"scheme": "w8a16", "group_size": 16, "is_symmetric": False}),
    ("gptq", {"scheme": "w8a8"}),
    ("gptq", {"scheme": "w4a8", "group_size": 16}),
    ("gptq", {"scheme": "fp8"}),
]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("method", "fields"), CASES, ids=str)
def test_the_package_reads_the_numbers_that_our_reader_reads(
    method: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import CompressedTensorsConfig

    make_model_with_tokenizer(tmp_path / "model")
    texts = None if method == "rtn" else write_texts(tmp_path / "texts.jsonl", demo_documents()[:200])
    output = quantize(tmp_path / "model", tmp_path / "out", method, texts, **fields)
    ours = read(output)
    # transformers 5.23 reads packed zero points only if it dequantizes at once. That it does for models of one scheme.
    options = {}
    if not fields.get("is_symmetric", fields.get("scheme", "w4a16") != "w4a16"):
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        theirs(input_ids=TOKENS, use_cache=False)  # which unpacks the weights
    num_compared = 0
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedLinear):
            linear = theirs.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            torch.testing.assert_close(module.matrix.dequantize(), linear.weight.detach(), rtol=1e-6, atol=1e-6)
            num_compared += 1
    assert num_compared == 3 * 7
    if fields.get("scheme", "w4a16").endswith("a16"):  # others round activations, each in its own way
        with torch.no_grad():
            found, expected = (model(input_ids=TOKENS, use_cache=False).logits for model in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
