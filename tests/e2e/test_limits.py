"""Claims about clients that send too much, too slowly, or nothing, and about those that do not read."""

from __future__ import annotations

import gzip
import json
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from tests.raw_sockets import connect, post, read_answer, read_error, seconds_until_closed
from tests.server_process import ServerProcess, serving

HEALTH = b"GET /health HTTP/1.1\r\n\r\n"
LIMITS = {
    "max-connections": 64,
    "max-total-body-bytes": 2**25,
    "max-header-bytes": 8192,
    "header-timeout": 0.5,
    "body-timeout": 0.5,
    "send-timeout": 1,
    "num-kv-blocks": 1024,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = [word for name, value in LIMITS.items() for word in (f"--{name}", str(value))]
    with serving(*flags, log=tmp_path_factory.mktemp("limits") / "log") as server:
        yield server
        assert "Traceback" not in server.log.read_text()


def num_refused(server: ServerProcess, code: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if f'rejections_total{{model_name="demo",reason="{code}"' in line
    )


def resident_mib(server: ServerProcess) -> float:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


# -- heads -------------------------------------------------------------------------------------------------------------


def test_a_header_of_100_mib_is_refused_and_costs_no_memory(server: ServerProcess) -> None:
    before = resident_mib(server)
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        for _ in range(100):
            client.sendall(bytes(2**20).replace(b"\0", b"x"))
        assert read_error(client) == (431, "headers_too_large")
        assert seconds_until_closed(client) < 0.5
    assert resident_mib(server) - before < 4


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"A: " + b"x" * 8000 + b"\r\n", 200),
        (b"A: " + b"x" * 8200 + b"\r\n", 431),
        (b"A: b\r\n" * 200, 200),
        (b"A: b\r\n" * 300, 431),
    ],
)
def test_a_head_has_a_size(server: ServerProcess, head: bytes, status: int) -> None:
    with connect(server) as client:
        for _ in range(1 if status == 431 else 3):
            client.sendall(b"GET /health HTTP/1.1\r\n" + head + b"\r\n")
            assert read_answer(client)[0] == status


def test_trailers_and_chunk_extensions_have_one_too(server: ServerProcess) -> None:
    """They come after the head and are in no body, so nobody else would count them."""
    chunked = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    for endless in (b"0\r\nX-Long: ", b"1;extension="):
        for head in (chunked, chunked.replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1)):
            with connect(server) as client:
                client.sendall(head + endless + b"x" * 20_000)
                assert read_error(client) == (431, "headers_too_large")


def test_half_heads_and_silent_connections_are_closed_and_nobody_else_waits(server: ServerProcess) -> None:
    with ExitStack() as stack:
        half = [stack.enter_context(connect(server)) for _ in range(40)]
        silent = [stack.enter_context(connect(server)) for _ in range(10)]
        for client in half:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: a")
        started = time.monotonic()
        while time.monotonic() < started + 0.3:
            asked = time.monotonic()
            assert server.client.get("/health").status_code == 200
            assert time.monotonic() - asked < 0.05
        for client in half:
            assert read_error(client) == (408, "request_timeout")
        for client in silent:
            assert client.recv(1) == b""
        assert 0.4 < time.monotonic() - started < 1.5


def test_between_requests_a_connection_may_be_silent_but_not_in_the_midst_of_a_head(server: ServerProcess) -> None:
    with connect(server) as client:
        for pause_s in (0.8, 0):
            client.sendall(HEALTH)
            assert read_answer(client)[0] == 200
            time.sleep(pause_s)
        client.sendall(HEALTH[:10])
        started = time.monotonic()
        assert read_error(client) == (408, "request_timeout")
        assert 0.4 < time.monotonic() - started < 1.5


def test_what_is_not_http_is_refused_in_the_error_schema(server: ServerProcess) -> None:
    before = num_refused(server, "invalid_http")
    both = b"POST /generate HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", both):
        with connect(server) as client:
            client.sendall(garbage)
            assert read_error(client) == (400, "invalid_http")
            assert client.recv(1) == b""
    assert num_refused(server, "invalid_http") - before == 4


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_a_body_of_3_mib_passes_in_one_piece_and_in_chunks(server: ServerProcess) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode() + b" " * 3 * 2**20
    assert server.client.post("/generate", content=body).status_code == 200
    assert server.client.post("/generate", content=iter([body[:1000], body[1000:]])).status_code == 200


def test_a_chunked_body_over_the_limit_is_refused_though_it_tells_no_length(server: ServerProcess) -> None:
    response = server.client.post("/generate", content=iter([b" " * 2**20] * 9))
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("sent_s", [0.0, 0.1])
def test_a_body_that_does_not_come_is_given_up(server: ServerProcess, sent_s: float) -> None:
    """Nothing of it, or a byte now and then."""
    with connect(server) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        started = time.monotonic()
        while sent_s and time.monotonic() < started + 0.4:
            client.sendall(b" ")
            time.sleep(sent_s)
        status, headers, _ = read_answer(client)
        assert status == 408 and headers["connection"] == "close"
        assert 0.4 < time.monotonic() - started < 1.5
        assert seconds_until_closed(client) < 0.5


def test_what_follows_a_body_shorter_than_it_said_is_no_request(server: ServerProcess) -> None:
    """Its end is what the length says; here that takes in what looks like another request."""
    request = post("/generate", prompt="a", max_tokens=1)
    with connect(server) as client:
        client.sendall(request.replace(b"Content-Length: ", b"Content-Length: 1") + HEALTH)
        assert read_error(client) == (408, "request_timeout")
        assert seconds_until_closed(client) < 0.5


def test_an_answer_that_comes_before_the_body_does_not_wait_for_it_for_ever(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n{")
        assert read_error(client) == (413, "request_too_large")
        assert 1 < seconds_until_closed(client) < 3
    with connect(server) as client:  # who sends it after all may stay
        client.sendall(b"POST /nowhere HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
        assert read_error(client)[0] == 404
        client.sendall(b"12345" + HEALTH)
        assert read_answer(client)[0] == 200


def test_bodies_have_a_bound_together_and_small_ones_pass_meanwhile(server: ServerProcess) -> None:
    """Each is within its own limits, and all but whole."""
    most = bytes(7 * 2**20).replace(b"\0", b" ")

    def hold(_: int = 0) -> tuple[int, str]:
        with connect(server) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 8388608\r\n\r\n")
            with suppress(ConnectionError):  # it has been answered
                client.sendall(most)
            status, headers, body = read_answer(client)
            assert status == 408 or int(headers["retry-after"]) > 0
            return status, json.loads(body)["error"]["code"]

    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # the peak is counted from here
    before = resident_mib(server)
    with ThreadPoolExecutor(60) as threads:
        answers = [threads.submit(hold) for _ in range(60)]
        while not all(answer.done() for answer in answers):
            assert server.client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        told = [answer.result() for answer in answers]
    assert set(told) == {(408, "request_timeout"), (503, "overloaded")}
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    # Beside the 32 MiB: what 60 connections have on the way to be read, and what the allocator makes of it.
    assert peak is not None and int(peak[1]) / 2**10 - before < 96
    with ThreadPoolExecutor(4) as threads:  # all is there again
        assert list(threads.map(hold, range(4))) == [(408, "request_timeout")] * 4


def test_compressed_bodies_are_refused(server: ServerProcess) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b"a" * 10**6)
    response = server.client.post("/generate", content=bomb, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_encoding"
    body = {"prompt": "a", "max_tokens": 1}
    assert server.client.post("/generate", json=body, headers={"Content-Encoding": "identity"}).status_code == 200


# -- connections -------------------------------------------------------------------------------------------------------


def test_one_connection_too_many_is_told_so_and_the_others_go_on(server: ServerProcess) -> None:
    with ExitStack() as stack:
        server.client.close()  # the connections that it keeps count, too
        server.client = httpx2.Client(base_url=server.url, timeout=10)
        streaming = stack.enter_context(connect(server))
        streaming.sendall(post("/generate", prompt="a", max_tokens=100, ignore_eos=True))
        clients = [stack.enter_context(connect(server)) for _ in range(63)]
        for client in clients:
            client.sendall(HEALTH)
            assert read_answer(client)[0] == 200
        for _ in range(100):
            with connect(server) as refused:
                status, headers, body = read_answer(refused)
                assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
                assert int(headers["retry-after"]) >= 1
        for client in clients:
            client.sendall(HEALTH)
            assert read_answer(client)[0] == 200
        assert read_answer(streaming)[0] == 200
    assert server.client.get("/health").status_code == 200


def test_a_server_without_file_descriptors_recovers_by_itself(server: ServerProcess) -> None:
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    num_files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_files + 20, hard))
    try:
        with ExitStack() as stack:
            for _ in range(1000):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", server.port))
            time.sleep(0.7)  # then the silent ones among them have been closed
            with connect(server) as client:
                client.sendall(HEALTH)
                assert read_answer(client)[0] == 200
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_pipelined_requests_are_answered_in_order_and_only_so_many_wait(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(post("/generate", prompt="a", max_tokens=5) + HEALTH)
        client.settimeout(10)
        received = b""
        while received.count(b"HTTP/1.1 200") < 2:
            received += client.recv(2**16)
        assert received.index(b"generated_text") < received.rindex(b"HTTP/1.1 200")
    before = resident_mib(server)
    with connect(server) as client:
        client.sendall(post("/generate", prompt="a", max_tokens=5) + HEALTH * 100_000)
        assert read_answer(client)[0] == 200
        seconds_until_closed(client)
    assert resident_mib(server) - before < 8


def test_200_requests_on_one_connection(server: ServerProcess) -> None:
    with connect(server) as client:
        for number in range(200):
            client.sendall(HEALTH if number % 10 else post("/generate", prompt="a", max_tokens=1))
            assert read_answer(client)[0] == 200


# -- clients that leave, or do not read --------------------------------------------------------------------------------


def test_answers_that_nobody_reads_are_given_up_and_their_blocks_come_back(server: ServerProcess) -> None:
    before, was_given_up = resident_mib(server), num_refused(server, "send_timeout")
    with ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(connect(server, receive_buffer=2048))
            client.sendall(post("/generate_stream", prompt="a", max_tokens=1500, ignore_eos=True, logprobs=20))
        deadline = time.monotonic() + 20
        while num_refused(server, "send_timeout") - was_given_up < 16:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.wait_until_at_rest()
    assert resident_mib(server) - before < 32


@pytest.mark.parametrize("way", ["reset", "close", "shutdown", "pipelined"])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_client_that_leaves_gives_its_blocks_back(server: ServerProcess, path: str, way: str) -> None:
    """Half a farewell is one, too: see servekit/http_protocol.py."""
    with connect(server) as client:
        client.sendall(post(path, prompt="a", max_tokens=1900, ignore_eos=True))
        server.wait_for_metric("servekit_num_requests_running", 1)
        if way == "pipelined":
            client.sendall(HEALTH)
            time.sleep(0.05)
        if way == "shutdown":
            client.shutdown(socket.SHUT_WR)
        elif way == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if way != "shutdown":
            client.close()
        left = server.metric("servekit_generation_tokens_total")
        server.wait_until_at_rest()
        assert server.metric("servekit_generation_tokens_total") - left < 200, "it went on for nobody"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_client_with_a_large_body_is_seen_to_leave_too(server: ServerProcess, path: str) -> None:
    """It comes in one piece behind its head, which pauses reading; whoever does not read hears of no departure."""
    body = b'{"prompt": "a", "max_tokens": 1900, "ignore_eos": true}' + b" " * 200_000
    with connect(server) as client:
        client.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
        )
        time.sleep(0.1)
        client.sendall(body)
        server.wait_for_metric("servekit_num_requests_running", 1)
        client.shutdown(socket.SHUT_WR)
        left = server.metric("servekit_generation_tokens_total")
        server.wait_until_at_rest()
        assert server.metric("servekit_generation_tokens_total") - left < 200, "it went on for nobody"
