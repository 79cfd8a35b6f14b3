"""The scales of keys and values that a checkpoint brings for a KV cache in float8.

Its author measured the model with them. For checkpoints without any, each vector is stored with its own scale.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

from servekit.errors import ConfigError
from workers.kv_cache.pages import LayerShape
from workers.loading.checkpoint import find_weights

log = logging.getLogger("servekit.worker")

MAX_NAME_LENGTH = 200  # names are an attacker's choice, and matching takes quadratic time
# As compressed-tensors, ModelOpt and older versions of compressed-tensors name them.
_NAME = re.compile(r"(?:\w+\.)*layers\.(\d{1,5})\.(?:\w+\.)*(?:([kv])_scale|([kv])_proj\.output_scale)")


def with_checkpoint_scales(layers: list[LayerShape], path: Path, first_layer: int = 0) -> list[LayerShape]:
    """Return the layers with the scales that the safetensors in `path` have for them.

    `layers` are those of this process, and the first of them is the model's layer `first_layer`. A scale is one number
    for all heads, or one for each. Raises ConfigError for scales that are not finite and positive, or not as many.
    """
    found = _read(path, {first_layer + index: layer.num_kv_heads for index, layer in enumerate(layers)})
    if found:
        log.info("the checkpoint has %d scales for the keys and values of %d layers", len(found), len(layers))
    return [
        replace(layer, key_scales=found.get((number, "k")), value_scales=found.get((number, "v")))
        for number, layer in enumerate(layers, start=first_layer)
    ]


def _read(path: Path, num_heads: dict[int, int]) -> dict[tuple[int, str], tuple[float, ...]]:
    """Return scales by layer and "k" or "v", one for each head. num_heads: by layer."""
    found: dict[tuple[int, str], tuple[float, ...]] = {}
    if not path.is_dir():  # a GGUF file, or a test without files
        return found
    for file in find_weights(path):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                match = _NAME.fullmatch(name) if len(name) <= MAX_NAME_LENGTH else None
                layer = -1 if match is None else int(match[1])
                if match is None or layer not in num_heads:
                    continue
                size = math.prod(opened.get_slice(name).get_shape())
                if size not in (1, num_heads[layer]):
                    raise ConfigError(
                        f"{file} has {size} numbers in {name}, and the layer has {num_heads[layer]} key-value heads; "
                        "--kv-cache-dtype int8 does not need the checkpoint's scales"
                    )
                scales = opened.get_tensor(name).double().flatten().expand(num_heads[layer]).tolist()
                if not all(math.isfinite(scale) and scale > 0.0 for scale in scales):
                    raise ConfigError(
                        f"{file} has a scale in {name} that is not a positive number; --kv-cache-dtype int8 does not "
                        "need the checkpoint's scales"
                    )
                found[layer, match[2] or match[3]] = tuple(scales)
    return found
