"""Tests of the settings about workers that join: each mistake has a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.joining.address import TcpAddress, UnixAddress, parse_address
from servekit.joining.settings import listener_settings


@pytest.fixture
def key(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef" * 4 + "\n")
    file.chmod(0o600)
    return str(file)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/servekit.sock", UnixAddress("/run/servekit.sock")),
        ("unix:///run/servekit.sock", UnixAddress("/run/servekit.sock")),
        ("tcp://10.0.0.7:8100", TcpAddress("10.0.0.7", 8100)),
        ("tcp://gpu-7.example:8100/", TcpAddress("gpu-7.example", 8100)),
        ("tcp://[::1]:8100", TcpAddress("::1", 8100)),
    ],
)
def test_addresses(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text, "--connect") == address
    assert parse_address(str(address), "--connect") == address


@pytest.mark.parametrize(
    "text",
    ["", "/run/x", "unix:", "unix:x", "unix:/" + "x" * 107, "tcp://x", "tcp://x:99999", "http://x:80", "tcp:x:1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--connect = "):
        parse_address(text, "--connect")


def test_the_key_is_read_without_white_space(key: str) -> None:
    settings = listener_settings(ServeConfig(listen_workers="unix:/run/x.sock", worker_key_file=key))
    assert settings is not None and settings.key == b"0123456789abcdef" * 4 and settings.tls is None
    assert listener_settings(ServeConfig()) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"worker_key_file": "KEY"}, "worker_key_file has no effect without listen_workers"),
        ({"listen_workers": "unix:/x"}, "needs worker_key_file"),
        ({"listen_workers": "unix:/x", "worker_key_file": "/nowhere"}, "No such file or directory"),
        ({"listen_workers": "tcp://h:1", "worker_key_file": "KEY", "worker_tls_cert": "c"}, "belong together"),
    ],
)
def test_mistakes_are_refused_with_a_sentence(key: str, values: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        listener_settings(ServeConfig(**{name: key if value == "KEY" else value for name, value in values.items()}))


def test_tls_has_no_use_with_a_unix_socket(key: str, certificate: tuple[str, str]) -> None:
    cert, private = certificate
    with pytest.raises(ConfigError, match="no use with a Unix socket"):
        listener_settings(
            ServeConfig(listen_workers="unix:/x", worker_key_file=key, worker_tls_cert=cert, worker_tls_key=private)
        )


def test_it_warns_of_an_unencrypted_network_and_of_a_key_that_all_can_read(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener_settings(ServeConfig(listen_workers="tcp://127.0.0.1:1", worker_key_file=key))
    assert not caplog.records
    Path(key).chmod(0o644)
    listener_settings(ServeConfig(listen_workers="tcp://10.0.0.7:1", worker_key_file=key))
    assert "not encrypted" in caplog.text and "chmod 600" in caplog.text
