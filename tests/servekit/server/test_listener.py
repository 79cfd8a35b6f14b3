"""The listening socket's end: clients that have connected are served, and no further ones connect."""

from __future__ import annotations

import asyncio
import socket

import pytest

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.server import listener
from servekit.server.listener import bind_all, drop_syns, num_to_accept, stop_connecting


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def listening(request: pytest.FixtureRequest) -> socket.socket:
    family, host = request.param
    try:
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error}")


def test_clients_that_have_connected_are_accepted_and_others_cannot_connect(listening: socket.socket) -> None:
    with listening:
        connected = [socket.create_connection(listening.getsockname()[:2]) for _ in range(3)]
        drop_syns(listening)
        with pytest.raises(TimeoutError):
            socket.create_connection(listening.getsockname()[:2], timeout=0.2)
        assert num_to_accept(listening) == 3
        for client in connected:
            accepted, _ = listening.accept()
            accepted.sendall(b"hello")
            assert client.recv(5) == b"hello"
            client.sendall(b"and back")
            assert accepted.recv(8) == b"and back", "the filter drops nothing else"
            accepted.close()
            client.close()
        assert num_to_accept(listening) == 0


async def test_close_waits_until_all_that_have_connected_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname()[:2])
        closing = asyncio.create_task(stop_connecting([listening]))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not closing.done()
        accepted, _ = listening.accept()
        await closing
        accepted.close()
        client.close()


async def test_a_kernel_without_socket_filters_is_told_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(listening: socket.socket) -> None:
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(listener, "drop_syns", refuse)
    monkeypatch.setattr(listener, "ACCEPT_TICK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()[:2]):
        await stop_connecting([listening])  # nobody accepts the connection, and yet it ends
    assert "the kernel refuses a socket filter (Protocol not available)" in caplog.text


def test_sockets_of_api_processes_share_a_port_and_its_clients() -> None:
    listeners = bind_all(ServeConfig(port=0, api_processes=3))
    addresses = {each.getsockname() for each in listeners}
    assert len(listeners) == 3 and len(addresses) == 1
    clients = [socket.create_connection(*addresses) for _ in range(64)]
    waiting = list(map(num_to_accept, listeners))
    assert sum(waiting) == 64 and 0 not in waiting, "the probability that one of them gets none is 1 in 10 to the 11"
    for each in (*clients, *listeners):
        each.close()


def test_a_port_that_another_server_has_is_not_shared_by_mistake() -> None:
    listeners = bind_all(ServeConfig(port=0, api_processes=2))
    port = listeners[0].getsockname()[1]
    words = f"cannot listen on 127.0.0.1:{port}: Address already in use; another program has this port"
    with pytest.raises(ConfigError, match=words):
        bind_all(ServeConfig(port=port, api_processes=2))
    for each in listeners:
        each.close()
