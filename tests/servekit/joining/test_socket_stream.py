"""Claims about the connection of a worker: a peer that is gone is noticed, also if neither side sends anything."""

from __future__ import annotations

import socket

from servekit.joining.socket_stream import TCP_USER_TIMEOUT_S, limit_silence


def test_the_kernel_asks_a_silent_peer_after_seconds_and_not_after_hours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        limit_silence(client)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, interval_s, num_questions = (
            client.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + interval_s * num_questions <= 30
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == TCP_USER_TIMEOUT_S * 1e3


def test_sockets_without_these_options_are_left_as_they_are() -> None:
    limit_silence(None)
    first, second = socket.socketpair()
    with first, second:
        limit_silence(first)
        assert not first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
