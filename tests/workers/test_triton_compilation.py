"""The Triton kernels compile for three generations of GPUs, use the tensor cores, and need what a table says.

This needs no GPU. The table is triton_resources.json: for each kernel, the registers of a thread, the bytes of shared
memory of a program, and the bytes of its stack, to which registers are spilled. Fewer programs of a kernel fit onto a
multiprocessor if it needs more of these, and a change may do that unnoticed. After a change that is meant to, and after
one of Triton's version, write the table anew: `python -m tests.workers.test_triton_compilation write`.

To compile all of them takes two minutes and a half, and gives the same each time. So triton_compiled.json has what came
out, by Triton's own key: a hash of the source, the arguments, the options, and all files of Triton and its assembler.
A kernel is compiled again only if its key is not there. SAMPLE is compiled each time: it shows that the files are true.
Kernels that are not in the file, yet, are kept in pytest's cache. `write` writes this file, too.

Triton's interpreter accepts more than its compiler does, so the tests that use it do not show this. The compiler runs
in a process of its own, because Triton's functions are compiled or interpreted for the life of a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CONSUMER_SHARED_MEMORY_BYTES = 99 * 1024  # of an RTX 3090, 4090 or 5090; data-centre GPUs have more
MAX_CACHE_BYTES = 100 * 2**20
RESERVED_BYTES = 1024  # of each program's shared memory, by the system
CAPABILITIES = (80, 90, 100)  # of an A100, of an H100 or H200, of a B200
TABLE = Path(__file__).parent / "triton_resources.json"
COMPILED = Path(__file__).parent / "triton_compiled.json"
SAMPLE = ("_swiglu_kernel", "_add_splits_kernel", "_choose_kernel")  # quickly compiled
NEEDS = ("registers", "shared_memory_bytes", "stack_bytes")
MORE_REGISTERS = 8  # than the table has: one step in which they are allocated
_case = ""  # what is being compiled


@pytest.mark.long
def test_kernels_compile_use_the_tensor_cores_and_fit_the_shared_memory(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(_cache_folder(request.config) or tmp_path)
    process = subprocess.run(
        [sys.executable, "-m", "tests.workers.test_triton_compilation"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    known = compiled_before()
    for capability in CAPABILITIES:
        for name in SAMPLE:
            again = [each for each in kernels if each["capability"] == capability and each["name"] == name]
            assert again and all(each["is_compiled_now"] for each in again)
    for kernel in kernels:
        assert not kernel["is_compiled_now"] or needs_of(kernel) == known.get(kernel["key"], needs_of(kernel)), kernel
    names = {
        *("_attend_kernel", "_plan_kernel", "_reduce_kernel", "_store_kernel", "_rotate_and_store_kernel"),
        *("_add_norm_kernel", "_swiglu_kernel", "_multiply_kernel", "_add_splits_kernel", "_dequantize_kernel"),
        *("_survey_kernel", "_choose_kernel", "_keep_kernel", "_choose_filtered_kernel"),
    }
    for capability in CAPABILITIES:
        assert {kernel["name"] for kernel in kernels if kernel["capability"] == capability} == names
    for kernel in kernels:
        assert kernel["shared_memory_bytes"] + RESERVED_BYTES <= CONSUMER_SHARED_MEMORY_BYTES, kernel
        assert kernel["has_matrix_instructions"] == (kernel["name"] in ("_attend_kernel", "_multiply_kernel")), kernel
    expected, found = json.loads(TABLE.read_text()), table_of(kernels)
    assert expected.keys() == found.keys()
    for kernel_of_gpu, needs in found.items():
        allowed = expected[kernel_of_gpu]
        assert needs["registers"] <= allowed["registers"] + MORE_REGISTERS, (kernel_of_gpu, needs, allowed)
        assert needs["shared_memory_bytes"] <= allowed["shared_memory_bytes"], (kernel_of_gpu, needs, allowed)
        assert needs["stack_bytes"] <= allowed["stack_bytes"], (kernel_of_gpu, needs, allowed)


def needs_of(kernel: dict[str, Any]) -> dict[str, Any]:
    """Return what Triton and its assembler say of a compiled kernel."""
    return {
        name: kernel[name] for name in ("has_matrix_instructions", "registers", "shared_memory_bytes", "stack_bytes")
    }


def compiled_before() -> dict[str, dict[str, Any]]:
    """Return what is known of kernels, by Triton's key."""
    known: dict[str, dict[str, Any]] = json.loads(COMPILED.read_text()) if COMPILED.exists() else {}
    return known


def table_of(kernels: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the most that any variant of a kernel needs, by generation of GPUs, kernel and case."""
    table: dict[str, dict[str, int]] = {}
    for kernel in kernels:
        row = table.setdefault(f"sm_{kernel['capability']} {kernel['name']} {kernel['case']}", {})
        for need in NEEDS:
            row[need] = max(row.get(need, 0), kernel[need])
    return dict(sorted(table.items()))


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


def main(known: dict[str, dict[str, Any]]) -> None:
    """Launch every kernel on GPUs that do not exist, and print a line of JSON for each, compiled if it is not known."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_key
    from triton.runtime.jit import JITFunction

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

    def report(**properties: Any) -> None:
        print(json.dumps({"case": _case, **properties}))  # noqa: T201

    def run(kernel: CompiledKernel) -> object:
        report(
            capability=kernel.metadata.target.arch,
            name=kernel.metadata.name,
            key=kernel.hash,
            is_compiled_now=True,
            has_matrix_instructions=any(name in kernel.asm["ptx"] for name in MATRIX_INSTRUCTIONS),
            shared_memory_bytes=kernel.metadata.shared,
            **resources_of(kernel.asm["cubin"]),
        )
        return lambda *_: None

    def compile_if_unknown(self: Any, key: str, signature: Any, capability: int, *rest: Any) -> CompiledKernel | None:
        """Return None, and launch nothing, if the kernel is known."""
        constants, options, attributes, _ = rest
        source = self.ASTSource(self, signature, constants, attributes)
        text = get_cache_key(source, self.device_caches[capability][3], options, get_cache_invalidating_env_vars())
        hashed = hashlib.sha256(text.encode()).hexdigest()
        if hashed not in known or self.__name__ in SAMPLE:
            return do_compile(self, key, signature, capability, *rest)
        report(capability=capability, name=self.__name__, key=hashed, is_compiled_now=False, **known[hashed])
        return None

    do_compile = JITFunction._do_compile
    JITFunction._do_compile = compile_if_unknown
    CompiledKernel.run = property(run)
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.function = None
    for capability in CAPABILITIES:
        triton.runtime.driver.set_active(CompileOnlyDriver(capability))
        attention(has_float8=capability >= 89)
        quantized_weights()
        layers(has_float8=capability >= 89)
        sampling()


MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


def resources_of(cubin: bytes) -> dict[str, int]:
    """Return what a thread of a compiled kernel needs, as NVIDIA's disassembler reads it; Triton brings that."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", listed)[-1]) for name in ("REG", "STACK"))
    return {"registers": registers, "stack_bytes": stack}


def case(name: str) -> None:
    """Name what is compiled next, for the table."""
    global _case
    _case = name


def attention(has_float8: bool) -> None:
    from workers.attention.triton_kernels import LayerPages, attend, store

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
        case(f"{'decode' if num_tokens == 4 else 'prompts'} {num_heads}/{num_kv_heads}x{dim} {str(dtype)[6:]}")
        queries = torch.empty(num_tokens, num_heads, dim, dtype=torch.bfloat16)
        numbers, table = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int32)
        sinks = None if window is None else torch.empty(num_heads)
        steps = (numbers, numbers[:4], table)
        pages = pages_of(LayerPages, num_kv_heads, dim, dtype)
        output, queries_each = torch.empty_like(queries), (1, 1) if num_tokens == 4 else (1, 900)
        attend(queries, pages, *steps, output, 0.1, window, softcap, sinks, queries_each=queries_each)
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

    case("")
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


def layers(has_float8: bool) -> None:
    from workers.attention.triton_kernels import LayerPages
    from workers.attention.triton_rotary import rotate_and_store
    from workers.layers.triton_ops import add_norm, geglu, swiglu

    hidden, qkv = torch.empty(4, 4096, dtype=torch.bfloat16), torch.empty(4, 48 * 128, dtype=torch.bfloat16)
    add_norm(hidden, hidden, torch.empty(4096), 1e-6)
    swiglu(hidden)
    geglu(hidden)
    angles = torch.empty(4, 128)
    norm, cells = torch.empty(128), torch.zeros(4, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if has_float8 else [])):
        pages = pages_of(LayerPages, 8, 128, dtype)
        rotate_and_store(qkv, 32, 8, 128, angles, angles, norm, norm, 1e-6, pages, cells)
        rotate_and_store(qkv, 32, 8, 128, angles, angles, None, None, 1e-6, pages, cells)
        part = angles[:, :96].contiguous()
        rotate_and_store(qkv, 32, 8, 128, part, part, None, None, 1e-6, pages, cells)


def sampling() -> None:
    from workers.sampling.triton_sampler import Filters, sample

    zeros = torch.zeros(4)
    sample(torch.empty(4, 151_936), zeros, zeros.double(), Filters(zeros.int(), zeros, zeros))


def write() -> None:
    """Compile all kernels, and write both files anew."""
    lines = subprocess.run(
        [sys.executable, "-m", "tests.workers.test_triton_compilation", "all"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    kernels = [json.loads(line) for line in lines]
    TABLE.write_text(json.dumps(table_of(kernels), indent=1) + "\n")
    rows = sorted({f" {json.dumps(kernel['key'])}: {json.dumps(needs_of(kernel))}" for kernel in kernels})
    COMPILED.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    else:
        main({} if sys.argv[1:] == ["all"] else compiled_before())
