"""Collect the facts that `servekit doctor` needs from a worker's Python: torch, C kernels, GPUs, a model's files.

No weights are read, and the model is not run. The C kernels are loaded, and compiled if necessary, as at the start of a
worker. Only this shows that the compiler and the cache folder can be used.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from servekit.protocol.cpu_dtype import multiplies_bfloat16, read_stored_numbers
from servekit.protocol.gguf_index import WEIGHTS as GGUF_WEIGHTS
from servekit.protocol.worker_facts import GpuFacts, KernelFacts, ModelFacts, TorchFacts, WorkerFacts
from workers.csrc.build import c_library, find_compiler
from workers.loading.checkpoint import count_tensors, find_weights, quantization_config
from workers.loading.gguf_index import has_gguf, read_index
from workers.loading.model_config import architecture_of, check_is_decoder, read_config
from workers.loading.refusals import in_one_line
from workers.loading.weights import check_extent
from workers.quantization.formats.registry import format_of, name_of

# Bytes of a number, as safetensors calls its type.
NUMBER_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NUMBER_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def worker_facts(model: str | None) -> WorkerFacts:
    """Collect facts of this machine, and of the model in the directory `model`, unless it is None."""
    return WorkerFacts(
        torch=_torch_facts(), kernels=_kernel_facts(), model=None if model is None else model_facts(Path(model))
    )


def _torch_facts() -> TorchFacts:
    gpus, problem = _gpus()
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        num_threads=torch.get_num_threads(),
        multiplies_bfloat16=multiplies_bfloat16(),
        gpus=gpus,
        gpu_problem=problem,
        triton=_version_of("triton") if gpus else None,
        flash_attn=_version_of("flash_attn") if gpus else None,
    )


def _gpus() -> tuple[tuple[GpuFacts, ...], str | None]:
    """Return the GPUs that torch can use, and why it cannot use them."""
    if torch.version.cuda is None:
        return (), None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found = [_gpu(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # the driver and torch raise various errors for a GPU that cannot be used
        return (), in_one_line(error)
    return tuple(found), None


def _gpu(index: int) -> GpuFacts:
    free, total = torch.cuda.mem_get_info(index)
    return GpuFacts(
        name=torch.cuda.get_device_name(index),
        capability=torch.cuda.get_device_capability(index),
        total_bytes=total,
        free_bytes=free,
    )


def _version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class _Messages(logging.Handler):
    """Keeps the messages that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _kernel_facts() -> KernelFacts:
    log, messages = logging.getLogger("servekit.worker"), _Messages()
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    log.propagate = False
    library = c_library("float32")
    return KernelFacts(is_loaded=library is not None, compiler=find_compiler(), messages=tuple(messages.texts))


def model_facts(path: Path) -> ModelFacts:
    """Return facts from the files of a model's directory; `problem` says why they cannot be served."""
    transformers_logging.set_verbosity_error()
    try:
        return _gguf_facts(path) if has_gguf(path) else _safetensors_facts(path)
    except ConfigError as error:
        return ModelFacts(problem=error.message)
    except Exception as error:  # transformers and safetensors raise various errors for damaged files
        return ModelFacts(problem=f"the files of {path} cannot be read: {in_one_line(error)}")


def _gguf_facts(path: Path) -> ModelFacts:
    types = Counter[str]()
    tensors = read_index(path)
    for tensor in tensors.values():
        types[tensor.type] += tensor.num_bytes
    (main, _), *_ = types.most_common(1)
    return ModelFacts(
        **_config_facts(path, [path / GGUF_WEIGHTS], len(tensors)),
        weight_format=f"GGUF, most of it {main}",
        is_quantized=any(tensor.is_packed for tensor in tensors.values()),
        file_bytes=(path / GGUF_WEIGHTS).stat().st_size,
    )


def _safetensors_facts(path: Path) -> ModelFacts:
    described = quantization_config(path)
    if described is not None:
        format_of(described)  # raises for a format that is not read
    files = find_weights(path)
    types = Counter[str]()
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            types.update(opened.get_slice(name).get_dtype() for name in opened.keys())  # noqa: SIM118  # no mapping
    main = types.most_common(1)[0][0]
    name = NUMBER_NAMES.get(main, main) if described is None else name_of(described)
    return ModelFacts(
        **_config_facts(path, files, count_tensors(files)),
        weight_format=f"safetensors, {name}",
        is_quantized=described is not None,
        file_bytes=sum(file.stat().st_size for file in files),
        file_number_bytes=NUMBER_BYTES.get(main, 0),
        cpu_dtype=read_stored_numbers(path).cpu_dtype,
    )


def _config_facts(path: Path, files: list[Path], num_tensors: int) -> dict[str, Any]:
    """Return facts from the model's config.json. Raises ConfigError for a model that cannot be served."""
    config = read_config(path)
    check_is_decoder(config)
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", 0) or 0
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // num_heads if num_heads else 0)
    return {
        "architecture": architecture_of(config),
        "num_parameters": check_extent(config, files, num_tensors).num_parameters(),
        "kv_numbers_per_token": 2 * text.num_hidden_layers * num_kv_heads * head_dim,
    }
