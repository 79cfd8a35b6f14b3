"""Read the header of a GGUF file: metadata by key, and where each tensor is.

The file may be malicious. Each count is compared with a limit, and with the bytes that are left, before anything is
made of it. So time and memory are bounded by the limits below, whatever the file claims.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from servekit.errors import ConfigError
from servekit.protocol.gguf_index import BLOCK_SIZES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Of the largest header known, Gemma 3's, these are about six times the bytes and twice the elements.
MAX_HEADER_BYTES = 2**26
MAX_ARRAY_ELEMENTS = 2**21  # of all arrays together
MAX_KEYS = 2**14
MAX_TENSORS = 2**16
MAX_KEY_BYTES = 2**10
MAX_DIMENSIONS = 4
MAX_DIMENSION = 2**31

# ggml's numbers of the types of tensors. Those that are not in BLOCK_SIZES are refused by these names.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_STRING, _ARRAY = 8, 9
# The other types of metadata values, as struct names them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file, by llama.cpp's name."""

    name: str
    type: str
    shape: tuple[int, ...]  # the dimension whose numbers are neighbours comes last
    offset: int  # from the beginning of the file


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a GGUF file's header. Every tensor lies within the file, and no two share a byte."""

    path: Path
    metadata: dict[str, Any]  # int, float, bool, str, or a list of one of them
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Read the header of a file. Raises ConfigError for a file that is not a whole GGUF file of a known kind."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_HEADER_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    reader = _Reader(path, data, size)
    num_tensors, num_keys = reader.begin()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text(MAX_KEY_BYTES)
        if key in metadata:
            raise reader.damaged(f"has the key {key[:60]!r} twice")
        (kind,) = reader.take("I")
        metadata[key] = reader.value(kind)
    infos = [reader.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise reader.damaged(f"has general.alignment = {str(alignment)[:40]}, which is not a power of two up to 2**20")
    start = -(-reader.position // alignment) * alignment
    return Header(path, metadata, _place(reader, infos, start))


def _place(reader: _Reader, infos: list[tuple[str, int, tuple[int, ...], int]], start: int) -> dict[str, TensorInfo]:
    """Return the tensors by name, with offsets from the beginning of the file."""
    tensors: dict[str, TensorInfo] = {}
    end = start
    for name, kind, shape, offset in sorted(infos, key=lambda info: info[3]):
        if name in tensors:
            raise reader.damaged(f"has the tensor {name[:60]!r} twice")
        type_name = TYPE_NAMES.get(kind, f"number {kind}")
        if type_name not in BLOCK_SIZES:
            raise ConfigError(
                f"{reader.path} holds the tensor {name[:60]!r} of type {type_name}, which servekit does not read; it "
                f"reads {', '.join(BLOCK_SIZES)}. Take another quantization of the same model, such as Q4_K_M"
            )
        numbers, num_bytes = BLOCK_SIZES[type_name]
        if shape[-1] % numbers:
            raise reader.damaged(f"has rows of {shape[-1]} numbers in {name[:60]!r}, and blocks of {numbers}")
        if start + offset < end:
            raise reader.damaged(f"has tensors that overlap, among them {name[:60]!r}")
        end = start + offset + prod(shape) // numbers * num_bytes
        if end > reader.size:
            raise ConfigError(
                f"{reader.path} is truncated: the tensor {name[:60]!r} ends at byte {end:,}, and the file has "
                f"{reader.size:,} bytes; download it again"
            )
        tensors[name] = TensorInfo(name, type_name, shape, start + offset)
    return tensors


class _Reader:
    """Takes values from the bytes of a header, one after the other."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        """`size` is that of the whole file, of which `data` is the beginning."""
        self.path, self.size, self.position = path, size, 0
        self._data, self._num_elements = data, 0

    def damaged(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path} {reason}: it is damaged, or no GGUF file; download it again")

    def begin(self) -> tuple[int, int]:
        """Return the number of tensors and the number of keys."""
        if self._data[:4] != MAGIC:
            raise self.damaged("does not begin with GGUF")
        self.position = 4
        (version,) = self.take("I")
        if version not in VERSIONS:
            order = ", or it is of a big-endian machine" if version & 0xFFFF == 0 else ""
            raise ConfigError(
                f"{self.path} is of version {version} of GGUF{order}; servekit reads versions 2 and 3 in little-endian "
                "order. Convert the model again with a newer llama.cpp"
            )
        num_tensors, num_keys = self.take("QQ")
        for count, limit, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_keys, MAX_KEYS, "keys")):
            if count > limit:
                raise self.damaged(f"claims to have {count} {what}, and at most {limit} are read")
        return num_tensors, num_keys

    def take(self, format_: str) -> tuple[Any, ...]:
        """Return the next values, in the little-endian `format_` of struct."""
        end = self.position + struct.calcsize(f"<{format_}")
        if end > len(self._data):
            raise self._ended()
        values = struct.unpack_from(f"<{format_}", self._data, self.position)
        self.position = end
        return values

    def text(self, max_bytes: int = MAX_HEADER_BYTES) -> str:
        (length,) = self.take("Q")
        end = self.position + length
        if length > max_bytes:
            raise self.damaged(f"has a text of {length} bytes where at most {max_bytes} are read")
        if end > len(self._data):
            raise self._ended()
        try:
            text = self._data[self.position : end].decode()
        except UnicodeDecodeError:
            raise self.damaged("has a text that is not UTF-8") from None
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        """Return the next metadata value, which is of this type."""
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.damaged(f"has a value of type {kind}")
        element, count = self.take("IQ")
        self._num_elements += count
        if self._num_elements > MAX_ARRAY_ELEMENTS:
            raise self.damaged(f"has arrays of more than {MAX_ARRAY_ELEMENTS} elements")
        if element in _SCALARS:
            return list(self.take(f"{count}{_SCALARS[element]}"))
        if element == _STRING:
            return [self.text() for _ in range(count)]
        raise self.damaged(f"has an array of values of type {element}")

    def tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return the next tensor's name, type, shape and offset from where the tensors begin."""
        name = self.text(MAX_KEY_BYTES)
        (num_dimensions,) = self.take("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"has a tensor of {num_dimensions} dimensions, {name[:60]!r}")
        dimensions = self.take(f"{num_dimensions}Q")
        if not all(1 <= dimension <= MAX_DIMENSION for dimension in dimensions):
            raise self.damaged(f"has a tensor of shape {list(dimensions)}, {name[:60]!r}")
        kind, offset = self.take("IQ")
        return name, kind, dimensions[::-1], offset

    def _ended(self) -> ConfigError:
        if len(self._data) == MAX_HEADER_BYTES:
            return self.damaged(f"has a header of more than {MAX_HEADER_BYTES:,} bytes")
        return ConfigError(f"{self.path} is truncated: it ends within its header; download it again")
