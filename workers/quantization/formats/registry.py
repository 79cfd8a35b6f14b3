"""Choose the format that a config.json describes, and give its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servekit.errors import ConfigError
from workers.quantization.formats.awq import Awq
from workers.quantization.formats.bitsandbytes import Bitsandbytes
from workers.quantization.formats.compressed_tensors import CompressedTensors
from workers.quantization.formats.fp8 import Fp8
from workers.quantization.formats.gguf import Gguf
from workers.quantization.formats.gptq import Gptq
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.formats.mxfp4 import Mxfp4

# By `quant_method`.
FORMATS: dict[str, type[WeightFormat]] = {
    "awq": Awq,
    "bitsandbytes": Bitsandbytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gguf": Gguf,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}

# The names of formats in messages, by their `quant_method`, as transformers' quantizers/auto.py lists them. For other
# methods, messages have the name in config.json.
NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "fp8": "FP8",
    "gguf": "GGUF",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "torchao": "torchao",
}


def format_of(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format that a `quantization_config` describes.

    Raises ConfigError for a format, or a variant of one, that is not read.
    """
    method = config.get("quant_method")
    chosen = FORMATS.get(method) if isinstance(method, str) else None
    if chosen is None:
        known = ", ".join(sorted(NAMES.get(name, name) for name in FORMATS))
        raise ConfigError(
            f"the weights are quantized in the format {name_of(config)}, which servekit does not read; it reads "
            f"{known}. Serve the unquantized checkpoint of the same model, and quantize it with --quantization"
        )
    return chosen.from_config(config)


def name_of(config: Mapping[str, Any]) -> str:
    """Return the format's name and, if given, the number of bits; bounded in length, because files may be hostile."""
    method = config.get("quant_method")
    name = NAMES.get(method, method) if isinstance(method, str) else "unknown"
    bits = config.get("bits", config.get("w_bit"))
    return f"{name[:40]}, {bits} bits" if type(bits) is int and 0 < bits <= 16 else name[:40]
