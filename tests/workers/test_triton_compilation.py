"""The Triton kernels compile for GPUs, use the tensor cores, and fit the shared memory. This needs no GPU.

Triton's interpreter accepts more than its compiler does, so the tests that use it do not show this. The compiler runs
in a process of its own, because Triton's functions are compiled or interpreted for the life of a process. Compiled
kernels are kept in pytest's cache, so they are compiled again only after a change; Triton's key is made of source and
options.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CONSUMER_SHARED_MEMORY_BYTES = 99 * 1024  # of an RTX 3090, 4090 or 5090; data-centre GPUs have more
MAX_CACHE_BYTES = 100 * 2**20
RESERVED_BYTES = 1024  # of each program's shared memory, by the system


@pytest.mark.long
def test_kernels_compile_use_the_tensor_cores_and_fit_the_shared_memory(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(_cache_folder(request.config) or tmp_path)
    process = subprocess.run(
        [sys.executable, "-m", "tests.workers.test_triton_compilation"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    attention_kernels = {"_attend_kernel", "_reduce_kernel", "_store_kernel"}
    other_kernels = {
        "_add_norm_kernel",
        "_rotate_and_store_kernel",
        "_swiglu_kernel",
        "_survey_kernel",
        "_choose_kernel",
        "_choose_filtered_kernel",
    }
    quantized_kernels = {"_multiply_kernel", "_add_splits_kernel", "_dequantize_kernel"}
    for capability, names in ((80, attention_kernels), (90, attention_kernels | quantized_kernels | other_kernels)):
        assert {kernel["name"] for kernel in kernels if kernel["capability"] == capability} == names
    for kernel in kernels:
        assert kernel["shared_memory_bytes"] + RESERVED_BYTES <= CONSUMER_SHARED_MEMORY_BYTES, kernel
        assert kernel["has_matrix_instructions"] == (kernel["name"] in ("_attend_kernel", "_multiply_kernel")), kernel


def _cache_folder(config: pytest.Config) -> Path | None:
    """Return the folder of compiled kernels; None with -p no:cacheprovider. Each version of the kernels adds 12 MB."""
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if cache is None:
        return None
    folder = cache.mkdir("triton")
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > MAX_CACHE_BYTES:
        shutil.rmtree(folder)
        folder.mkdir()
    return folder


def main() -> None:
    """Launch every kernel on GPUs that do not exist, and print a line of JSON for each compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel

    class CompileOnlyDriver:
        """A driver that loads and launches nothing. The number of its device is the compute capability."""

        def __init__(self, capability: int) -> None:
            self.capability = capability

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.capability, 32)

        def get_current_device(self) -> int:
            return self.capability

        def get_current_stream(self, device: int) -> int:
            return 0

    def run(kernel: CompiledKernel) -> object:
        instructions = kernel.asm["ptx"]
        properties = {
            "capability": kernel.metadata.target.arch,
            "name": kernel.metadata.name,
            "shared_memory_bytes": kernel.metadata.shared,
            "has_matrix_instructions": "mma.sync" in instructions or "wgmma.mma_async" in instructions,
        }
        print(json.dumps(properties))  # noqa: T201
        return lambda *_: None

    CompiledKernel.run = property(run)
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.function = None
    for capability in (80, 90):
        triton.runtime.driver.set_active(CompileOnlyDriver(capability))
        attention(has_float8=capability >= 89)
    quantized_weights()
    layers()
    sampling()


def attention(has_float8: bool) -> None:
    from workers.attention.triton_kernels import LayerPages, attend, make_workspace, store

    code_dtypes = (torch.int8, torch.float8_e4m3fn) if has_float8 else (torch.int8,)
    llama, small = ((32, 8, 128), (14, 2, 64))
    for (num_heads, num_kv_heads, dim), num_tokens, window, softcap, dtype in (
        (llama, 1000, None, None, torch.bfloat16),
        (llama, 4, None, None, torch.bfloat16),
        (small, 1000, 128, None, torch.bfloat16),
        ((8, 4, 256), 1000, None, 50.0, torch.bfloat16),
        ((8, 4, 256), 4, 4096, 50.0, torch.bfloat16),
        *((llama, num_tokens, None, None, codes) for num_tokens in (1000, 4) for codes in code_dtypes),
    ):
        queries = torch.empty(num_tokens, num_heads, dim, dtype=torch.bfloat16)
        numbers, table = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int32)
        workspace = make_workspace(num_heads, num_kv_heads, dim, torch.device("cpu"))
        sinks = None if window is None else torch.empty(num_heads)
        steps = (numbers, numbers[:4], table)
        pages = pages_of(LayerPages, num_kv_heads, dim, dtype)
        attend(queries, pages, *steps, torch.empty_like(queries), 0.1, workspace, window, softcap, sinks)
        if num_tokens == 4 and dim == 128:
            new_keys = queries[:, :num_kv_heads]
            store(new_keys, new_keys, pages, torch.zeros(num_tokens).long())


def pages_of(layer_pages: Any, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Any:
    """Return pages of this dtype, with scales if it is one of codes."""
    pages = torch.empty(3, 16, num_kv_heads, dim, dtype=dtype)
    scales = torch.empty(3, 16, num_kv_heads) if dtype.itemsize == 1 else None
    return layer_pages(pages, pages, scales, scales)


def quantized_weights() -> None:
    from workers.layers.triton_quantized import make_weight
    from workers.quantization.quantized_tensor import QuantizedTensor

    scales, levels = torch.zeros(4096, 32, dtype=torch.float16), tuple(0.25 * level for level in range(16))
    four_bits = torch.zeros(4096, 2048, dtype=torch.uint8)
    for matrix, num_rows in (
        (QuantizedTensor(four_bits, scales, offsets=scales), 1),
        (QuantizedTensor(four_bits, scales, offsets=scales), 65),
        (QuantizedTensor(four_bits, scales, levels=levels), 64),
        (QuantizedTensor(torch.zeros(4096, 4096, dtype=torch.int8), scales[:, :1]), 64),
        (QuantizedTensor(torch.zeros(4096, 4096, dtype=torch.float8_e4m3fn), scales.float()), 1),
    ):
        x = torch.empty(num_rows, 4096, dtype=torch.bfloat16)
        make_weight(matrix, None).multiply_add(x, torch.empty_like(x))


def layers() -> None:
    from workers.attention.triton_kernels import LayerPages
    from workers.attention.triton_rotary import rotate_and_store
    from workers.layers.triton_ops import add_norm, swiglu

    hidden, qkv = torch.empty(4, 4096, dtype=torch.bfloat16), torch.empty(4, 48 * 128, dtype=torch.bfloat16)
    add_norm(hidden, hidden, hidden[0], 1e-6)
    swiglu(hidden)
    angles = torch.empty(4, 128)
    norm, cells = torch.empty(128, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        pages = pages_of(LayerPages, 8, 128, dtype)
        rotate_and_store(qkv, 32, 8, 128, angles, angles, norm, norm, 1e-6, pages, cells)
        rotate_and_store(qkv, 32, 8, 128, angles, angles, None, None, 1e-6, pages, cells)


def sampling() -> None:
    from workers.sampling.triton_sampler import Filters, sample

    zeros = torch.zeros(4)
    sample(torch.empty(4, 151_936), zeros, zeros.double(), Filters(zeros.int(), zeros, zeros))


if __name__ == "__main__":
    main()
