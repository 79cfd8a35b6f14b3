"""Tests of --transfer-address."""

from __future__ import annotations

import pytest

from servekit.errors import ConfigError
from servekit.joining.address import TcpAddress
from servekit.joining.transfer_settings import parse_transfer_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, TcpAddress("", 0)),
        ("10.0.0.7", TcpAddress("10.0.0.7", 0)),
        ("gpu-7.internal:8101", TcpAddress("gpu-7.internal", 8101)),
        ("[fd00::7]", TcpAddress("fd00::7", 0)),
        ("[fd00::7]:8101", TcpAddress("fd00::7", 8101)),
    ],
)
def test_an_address_is_a_host_with_or_without_a_port(text: str | None, expected: TcpAddress) -> None:
    assert parse_transfer_address(text) == expected


@pytest.mark.parametrize("text", ["0.0.0.0", "0.0.0.0:8101", "[::]", "[::]:8101"])  # noqa: S104
def test_an_address_that_others_cannot_connect_to_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--transfer-address = .* is every address of this machine.*name one"):
        parse_transfer_address(text)


@pytest.mark.parametrize("text", ["", ":8101", "10.0.0.7:", "10.0.0.7:70000", "fd00::7", "tcp://10.0.0.7:8101"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--transfer-address"):
        parse_transfer_address(text)
