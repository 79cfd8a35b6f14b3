"""Claims about the file of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from servekit.errors import ConfigError
from servekit.planning.devices import find_device, known_devices, parse_devices

OWN = b"""
[mine]
name = "Mine"
memory_gb = 16
bandwidth_gb_s = 320
tflops = {bfloat16 = 65}
link_gb_s = 16
source = "measured"
"""


def test_every_device_has_a_source_and_plausible_figures() -> None:
    for key, device in known_devices().items():
        assert device.source and device.name, key
        assert 50 <= device.flop_per_s("bfloat16") / device.bytes_per_s <= 500, key
        assert device.flop_per_s("fp4") == device.flop_per_s("bfloat16"), "what is not in the file counts as bfloat16"


def test_every_price_has_its_provider_and_its_day() -> None:
    priced = [device for device in known_devices().values() if device.price_per_hour is not None]
    assert len(priced) >= 4
    for device in priced:
        assert re.search(r", 20\d\d-\d\d-\d\d$", device.price_source) and device.price_per_hour, device.name


def test_a_device_of_ones_own_is_found_beside_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_bytes(OWN)
    assert find_device("mine", tmp_path / "devices.toml").memory_bytes == 16e9
    assert find_device("h100", tmp_path / "devices.toml") == find_device("h100")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"bfloat16", b"fp8", "no bfloat16"),
        (b"320", b"0", "above 0"),
        (b"memory_gb", b"memory", "memory"),
        (b"[mine]", b"[mine", "not valid"),
        (b"Mine", b"\xff", "not valid"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(old: bytes, new: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_devices(OWN.replace(old, new))


def test_an_unknown_device_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="h100, h200"):
        find_device("h101")
    with pytest.raises(ConfigError, match="No such file"):
        find_device("mine", tmp_path / "missing.toml")
