"""TritonAttention agrees with a softmax in float64 over steps of prompt chunks and single tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_device import DEVICE, gpu_backends
from tests.workers.attention.test_backends import Case
from workers.attention.interface import AttentionParams
from workers.kv_cache.kv_quantization import PlainPages

if DEVICE.type != "cpu":
    pytest.skip("Case computes on the CPU", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


@pytest.mark.parametrize(
    "params", [AttentionParams(0.2), AttentionParams(0.2, 9, 4.0, torch.linspace(-1, 1, 6))], ids=["plain", "all"]
)
def test_triton_attention_is_attention(params: AttentionParams) -> None:
    Case((gpu_backends.TritonAttention(PlainPages(torch.float32)), torch.float32), params=params).assert_right()
