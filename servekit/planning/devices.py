"""Read the devices for which a plan can be made."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

from servekit.errors import ConfigError

_FILE = "devices.toml"
GIGA = 1e9
TERA = 1e12


class Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: peak figures, as data sheets have them."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: dict[str, float]  # by data type
    link_gb_s: float
    source: str
    is_cpu: bool = False
    price_per_hour: float | None = None  # of renting it; in US dollars in the package's file
    price_source: str = ""  # the provider, what it offers for that price, and the day on which that was read

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gb * GIGA)

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * GIGA

    def flop_per_s(self, data_type: str) -> float:
        """Multiplications and additions of a second. What a device lacks below bfloat16, it computes in that.

        Raises ConfigError for float32, if the device has no figure for it.
        """
        if data_type == "float32" and "float32" not in self.tflops:
            raise ConfigError(f"device {self.name!r}: tflops has no float32, which these weights need")
        return self.tflops.get(data_type, self.tflops["bfloat16"]) * TERA


@cache
def known_devices() -> dict[str, Device]:
    """The devices of the package's own file, by key."""
    return parse_devices(files(__package__).joinpath(_FILE).read_bytes())


def parse_devices(text: bytes) -> dict[str, Device]:
    """Parse a file of devices. Raises ConfigError."""
    try:
        devices = msgspec.convert(tomllib.loads(text.decode()), dict[str, Device])
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"the file of devices is not valid: {error}") from None
    for key, device in devices.items():
        if "bfloat16" not in device.tflops:
            raise ConfigError(f"device {key!r}: tflops has no bfloat16, which every plan needs")
        if min(device.memory_gb, device.bandwidth_gb_s, device.link_gb_s, *device.tflops.values()) <= 0:
            raise ConfigError(f"device {key!r}: all figures must be above 0")
    return devices


def find_device(key: str, path: Path | None = None) -> Device:
    """Return a device by its key, from a file of one's own or the package's. Raises ConfigError."""
    devices = known_devices()
    if path is not None:
        try:
            devices = {**devices, **parse_devices(path.read_bytes())}
        except OSError as error:
            raise ConfigError(f"--devices-file {path}: {error.strerror}") from None
    if key not in devices:
        raise ConfigError(
            f"--device {key}: unknown; use one of {', '.join(devices)}, or describe it in a file and give that with "
            "--devices-file"
        )
    return devices[key]
