"""Which format a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servekit.errors import ConfigError
from workers.quantization.formats.awq import Awq
from workers.quantization.formats.bitsandbytes import Bitsandbytes
from workers.quantization.formats.checks import quoted
from workers.quantization.formats.compressed_tensors import CompressedTensors
from workers.quantization.formats.fp8 import Fp8
from workers.quantization.formats.gptq import Gptq
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.formats.mxfp4 import Mxfp4

# By `quant_method`, as transformers' quantizers/auto.py names them.
FORMATS: dict[str, type[WeightFormat]] = {
    "awq": Awq,
    "bitsandbytes": Bitsandbytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def format_of(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format that a `quantization_config` describes.

    Raises ConfigError for a format, or a variant of one, that is not read.
    """
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # which did not always write its name
    chosen = FORMATS.get(method) if isinstance(method, str) else None
    if chosen is None:
        raise ConfigError(
            f"the weights are quantized in the format {quoted(method)}, which servekit does not read; it reads "
            f"{', '.join(sorted(FORMATS))}. Serve the unquantized checkpoint of the same model, with --quantization "
            "if it has to be small"
        )
    return chosen.from_config(config)
