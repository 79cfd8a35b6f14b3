"""Define what a worker's Python reports to `servekit doctor`: torch, C kernels, GPUs, and a model's files.

The server has no torch. So a process of `python -m servekit.worker --facts` collects this, and writes one WorkerFacts
as JSON.
"""

from __future__ import annotations

from msgspec import Struct


class GpuFacts(Struct, frozen=True, kw_only=True):
    """One GPU, as torch sees it."""

    name: str
    capability: tuple[int, int]  # CUDA's compute capability
    total_bytes: int
    free_bytes: int


class TorchFacts(Struct, frozen=True, kw_only=True):
    """The installed build of torch."""

    version: str
    cuda: str | None  # the version of CUDA that it was built for; None for a build for CPUs
    num_threads: int  # that an operation on the CPU uses
    multiplies_bfloat16: bool  # the processor has instructions for it
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str | None = None  # why CUDA does not start, in torch's words
    triton: str | None = None  # its version, or None if it is not installed
    flash_attn: str | None = None


class KernelFacts(Struct, frozen=True, kw_only=True):
    """The C kernels for float32 on this processor."""

    is_loaded: bool
    compiler: str | None  # the path of a C compiler
    messages: tuple[str, ...]  # of the log: where the kernels come from, or why there are none


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What a model's files say of it, without reading its weights."""

    architecture: str = ""
    weight_format: str = ""  # "safetensors, bfloat16", "safetensors, GPTQ, 4 bits" or "GGUF, Q4_K"
    is_quantized: bool = False
    file_bytes: int = 0  # of all weights
    file_number_bytes: int = 0  # of one number, if the weights are not quantized
    cpu_dtype: str = "float32"  # that --dtype auto is on this machine's CPU
    num_parameters: int = 0  # 0 if the format packs several into one number
    kv_numbers_per_token: int = 0  # keys and values of all layers; 0 if it is not known
    is_here: bool = True  # on this machine; otherwise it is downloaded at the first start
    problem: str | None = None  # why it cannot be served


class WorkerFacts(Struct, frozen=True, kw_only=True):
    """All of it."""

    torch: TorchFacts
    kernels: KernelFacts
    model: ModelFacts | None = None  # None if there is none on this machine
