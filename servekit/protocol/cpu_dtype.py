"""Which data type `--dtype auto` is on a CPU: bfloat16 for checkpoints that have it, if the processor multiplies it.

The server estimates memory by it, and a worker loads by it. This asks the kernel, and not torch, which takes seconds to
import.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Literal

from msgspec import DecodeError, Struct
from msgspec.json import decode
from msgspec.structs import replace

from servekit.protocol.gguf_index import WEIGHTS as GGUF_WEIGHTS

# A checkpoint whose config.json has "float32" under this key is computed so on all CPUs: the demo model, whose tokens
# are to be the same everywhere.
CONFIG_KEY = "servekit_cpu_dtype"
BFLOAT16_FEATURES = frozenset(("avx512_bf16", "amx_bf16"))  # as /proc/cpuinfo calls them


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions that multiply bfloat16."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith("flags")), "")
        return not BFLOAT16_FEATURES.isdisjoint(flags.split())
    return False


def cpu_dtype(stored: str | None, wanted: object = None) -> Literal["float32", "bfloat16"]:
    """Return what a CPU computes a model in whose checkpoint has numbers of this type, by its name.

    bfloat16 takes half the memory, and half the time; float32 is never less exact than the checkpoint. `wanted` is what
    the checkpoint has under CONFIG_KEY.
    """
    is_bfloat16 = stored == "bfloat16" and wanted != "float32" and multiplies_bfloat16()
    return "bfloat16" if is_bfloat16 else "float32"


class _TextConfig(Struct):
    """The part of config.json that is about text, in models that take more."""

    dtype: str | None = None
    torch_dtype: str | None = None


class StoredNumbers(_TextConfig):
    """The parts of a checkpoint's config.json that say how numbers are stored."""

    text_config: _TextConfig | None = None
    quantization_config: dict[str, object] | None = None
    servekit_cpu_dtype: str | None = None
    is_gguf: bool = False  # not in the file: GGUF's types are those of its blocks

    @property
    def type(self) -> str | None:
        """The type's name; None if the file does not say it."""
        text = self.text_config or self
        return self.dtype or self.torch_dtype or text.dtype or text.torch_dtype

    @property
    def cpu_dtype(self) -> Literal["float32", "bfloat16"]:
        """What `--dtype auto` is on this machine's CPU; float32 for quantized weights, whose numbers are codes."""
        is_quantized = self.is_gguf or bool(self.quantization_config)
        return cpu_dtype(None if is_quantized else self.type, self.servekit_cpu_dtype)


def read_stored_numbers(directory: Path) -> StoredNumbers:
    """Return what config.json says; nothing, if it cannot be read: loading the model reports that."""
    try:
        found = decode((directory / "config.json").read_bytes(), type=StoredNumbers)
        return replace(found, is_gguf=(directory / GGUF_WEIGHTS).exists())
    except (OSError, DecodeError, UnicodeDecodeError):
        return StoredNumbers()
