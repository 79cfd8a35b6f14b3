"""Clients that send too much, too slowly or nothing, and clients that do not read."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import resource
import shutil
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import httpx2
import pytest
import requests

from servekit.server.http_protocol import LINGER_IDLE_S
from tests.support.raw_sockets import connect, post, read_answer, read_error, seconds_until_closed
from tests.support.server_process import ServerProcess, serving
from tests.support.timing import TooLate, again_if_late, assert_on_time, assert_within

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


# -- heads -------------------------------------------------------------------------------------------------------------


def test_header_of_100_mib_is_refused_without_holding_it_in_memory(server: ServerProcess) -> None:
    before = server.resident_mib()
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        for _ in range(100):
            client.sendall(bytes(2**20).replace(b"\0", b"x"))
        assert read_error(client) == (431, "headers_too_large")
        seconds_until_closed(client)
    assert server.resident_mib() - before < 4


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"A: " + b"x" * 8000 + b"\r\n", 200),
        (b"A: " + b"x" * 8200 + b"\r\n", 431),
        (b"A: b\r\n" * 200, 200),
        (b"A: b\r\n" * 300, 431),
    ],
)
def test_size_and_number_of_headers_are_limited(server: ServerProcess, head: bytes, status: int) -> None:
    with connect(server) as client:
        for _ in range(1 if status == 431 else 3):
            client.sendall(b"GET /health HTTP/1.1\r\n" + head + b"\r\n")
            assert read_answer(client)[0] == status


def test_size_of_trailers_and_chunk_extensions_is_limited(server: ServerProcess) -> None:
    """They follow the head and are not part of a body, so no other limit covers them."""
    chunked = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    for endless in (b"0\r\nX-Long: ", b"1;extension="):
        for head in (chunked, chunked.replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1)):
            with connect(server) as client:
                client.sendall(head + endless + b"x" * 20_000)
                assert read_error(client) == (431, "headers_too_large")


@again_if_late
def test_slow_and_silent_connections_are_closed_and_others_are_served_meanwhile(server: ServerProcess) -> None:
    with ExitStack() as stack:
        started = time.monotonic()
        half = [stack.enter_context(connect(server)) for _ in range(40)]
        silent = [stack.enter_context(connect(server)) for _ in range(10)]
        for client in half:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: a")
        elapsed_s = []
        while not elapsed_s or time.monotonic() < started + 0.3:
            asked = time.monotonic()
            assert server.client.get("/health").status_code == 200
            elapsed_s.append(time.monotonic() - asked)
        for client in half:
            assert read_error(client) == (408, "request_timeout")
        for client in silent:
            assert client.recv(1) == b""
        assert time.monotonic() - started >= 0.9 * LIMITS["header-timeout"]
    assert_within(0.05, min(elapsed_s), "slow clients delay no other one")


def test_idle_connection_stays_open_but_an_unfinished_head_times_out(server: ServerProcess) -> None:
    with connect(server) as client:
        for pause_s in (0.8, 0):
            client.sendall(HEALTH)
            assert read_answer(client)[0] == 200
            time.sleep(pause_s)
        started = time.monotonic()
        client.sendall(HEALTH[:10])
        assert read_error(client) == (408, "request_timeout")
        assert time.monotonic() - started >= 0.9 * LIMITS["header-timeout"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_stream_has_one_connection_header_and_chunks_only_if_the_client_knows_them(
    server: ServerProcess, version: str
) -> None:
    request = post("/generate_stream", "Connection: close\r\n", prompt="a", max_tokens=3, ignore_eos=True)
    with connect(server) as client:
        client.sendall(request.replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1))
        received = b""
        while piece := client.recv(2**16):
            received += piece
    names, _, body = received.partition(b"\r\n\r\n")
    assert names.lower().count(b"\r\nconnection: ") == names.lower().count(b"\r\nconnection: close") == 1
    assert (b"transfer-encoding: chunked" in names.lower()) == (version == "1.1")
    assert body.startswith(b"data: ") == (version == "1.0") and body.count(b"data: ") == 3


def test_invalid_http_gets_an_error_in_the_error_schema(server: ServerProcess) -> None:
    before = num_refused(server, "invalid_http")
    both = b"POST /generate HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", both):
        with connect(server) as client:
            client.sendall(garbage)
            assert read_error(client) == (400, "invalid_http")
            assert client.recv(1) == b""
    assert num_refused(server, "invalid_http") - before == 4


# -- bodies ------------------------------------------------------------------------------------------------------------


@again_if_late
def test_body_of_3_mib_is_accepted_with_a_length_and_in_chunks(server: ServerProcess) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode() + b" " * 3 * 2**20
    for content in (body, iter([body[:1000], body[1000:]])):
        status = server.client.post("/generate", content=content).status_code
        assert_on_time(status != 408, "the body arrived within its half second")
        assert status == 200


def test_chunked_body_over_the_limit_is_refused(server: ServerProcess) -> None:
    response = server.client.post("/generate", content=iter([b" " * 2**20] * 9))
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


JAVA = """
import java.net.URI;
import java.net.http.*;
public class Client {
  public static void main(String[] arguments) throws Exception {
    var client = HttpClient.newHttpClient();
    for (byte[] body : new byte[][] {arguments[1].getBytes(), new byte[40 << 20]}) {
      var request = HttpRequest.newBuilder(URI.create(arguments[0])).POST(HttpRequest.BodyPublishers.ofByteArray(body));
      System.out.println(client.send(request.build(), HttpResponse.BodyHandlers.ofString()).statusCode());
    }
  }
}
"""


def ask_by_urllib(url: str, body: bytes) -> int:
    try:
        with urllib.request.urlopen(url, body) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def ask_by_http_client(url: str, body: bytes) -> int:
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request("POST", address.path, body)
    with connection.getresponse() as answer:
        answer.read()
        connection.close()
        return answer.status


@pytest.mark.parametrize(
    "ask",
    [
        ask_by_urllib,
        ask_by_http_client,
        lambda url, body: requests.post(url, body, timeout=30).status_code,
        lambda url, body: httpx.post(url, content=body, timeout=30).status_code,
        lambda url, body: httpx2.post(url, content=body, timeout=30).status_code,
    ],
    ids=["urllib", "http.client", "requests", "httpx", "httpx2"],
)
def test_client_reads_the_refusal_of_a_40_mib_body(server: ServerProcess, ask: Callable[[str, bytes], int]) -> None:
    """Some of them send the whole body before they read anything."""
    assert ask(f"{server.url}/generate", b"a" * 40 * 2**20) == 413
    assert ask(f"{server.url}/generate", b'{"prompt": "a", "max_tokens": 1}') == 200


@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_javas_client_is_answered(server: ServerProcess, tmp_path: Path) -> None:
    """Its first request asks for HTTP/2 (`Upgrade: h2c`), and has a body."""
    (tmp_path / "Client.java").write_text(JAVA)
    body = '{"prompt": "a", "max_tokens": 1}'
    done = subprocess.run(
        ["java", tmp_path / "Client.java", f"{server.url}/generate", body],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["200", "413"], done.stderr


@pytest.mark.parametrize("sent_s", [0.0, 0.1])
def test_body_that_does_not_arrive_times_out(server: ServerProcess, sent_s: float) -> None:
    """Nothing of it arrives, or a byte now and then."""
    with connect(server) as client:
        started = time.monotonic()
        client.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        with suppress(ConnectionError):  # it may have been closed while this test was kept waiting
            while sent_s and time.monotonic() < started + 0.4:
                client.sendall(b" ")
                time.sleep(sent_s)
        status, headers, _ = read_answer(client)
        assert status == 408 and headers["connection"] == "close"
        assert time.monotonic() - started >= 0.9 * LIMITS["body-timeout"]
        seconds_until_closed(client)


def test_bytes_within_the_declared_length_are_never_a_second_request(server: ServerProcess) -> None:
    """The body's end is where its length says, even if that includes what looks like another request."""
    request = post("/generate", prompt="a", max_tokens=1)
    with connect(server) as client:
        client.sendall(request.replace(b"Content-Length: ", b"Content-Length: 1") + HEALTH)
        assert read_error(client) == (408, "request_timeout")
        assert client.recv(1) == b"", "there is no second answer"


def test_early_answer_waits_a_bounded_time_for_the_rest_of_the_body(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n{")
        answered = time.monotonic()
        assert read_error(client) == (413, "request_too_large")
        seconds_until_closed(client)
        assert time.monotonic() - answered >= 0.9 * LINGER_IDLE_S
    with connect(server) as client:  # a client that completes its body keeps its connection
        client.sendall(b"POST /nowhere HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
        assert read_error(client)[0] == 404
        client.sendall(b"12345" + HEALTH)
        assert read_answer(client)[0] == 200


@again_if_late
def test_memory_of_all_bodies_is_bounded_and_small_bodies_pass_meanwhile(server: ServerProcess) -> None:
    """Each body is within its own limit, and almost complete."""
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
    before = server.resident_mib()
    with ThreadPoolExecutor(60) as threads:
        answers = [threads.submit(hold) for _ in range(60)]
        while not all(answer.done() for answer in answers):
            assert server.client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        refusals = [answer.result() for answer in answers]
    assert set(refusals) <= {(408, "request_timeout"), (503, "overloaded")}
    if (503, "overloaded") not in refusals:
        raise TooLate("the first bodies had timed out before the others came")
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


def test_connection_over_the_limit_gets_503_and_the_others_are_served(server: ServerProcess) -> None:
    with ExitStack() as stack:
        server.client.close()  # the connections that it keeps count, too
        server.client = httpx2.Client(base_url=server.url, timeout=60)
        streaming = stack.enter_context(connect(server))
        streaming.sendall(post("/generate", prompt="a", max_tokens=100, ignore_eos=True))
        clients = []
        for _ in range(63):
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(HEALTH)  # soon, because a connection that asks for nothing is closed
            assert read_answer(clients[-1])[0] == 200
        for _ in range(100):
            with connect(server) as refused:
                status, headers, body = read_answer(refused)
                assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
                assert int(headers["retry-after"]) >= 1
        for client in clients:
            client.sendall(HEALTH)
            assert read_answer(client)[0] == 200
        assert read_answer(streaming)[0] == 200
    deadline = time.monotonic() + 60
    while server.client.get("/health").status_code != 200:
        assert time.monotonic() < deadline, "the connections that were closed still count"


def test_a_server_without_file_descriptors_recovers_by_itself(server: ServerProcess) -> None:
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    num_files = server.num_open_files()
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


def test_pipelined_requests_are_answered_in_order_and_their_number_is_limited(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(post("/generate", prompt="a", max_tokens=5) + HEALTH)
        received = b""
        while received.count(b"HTTP/1.1 200") < 2:
            received += client.recv(2**16)
        assert received.index(b"generated_text") < received.rindex(b"HTTP/1.1 200")
    before = server.resident_mib()
    with connect(server) as client:
        client.sendall(post("/generate", prompt="a", max_tokens=5) + HEALTH * 100_000)
        assert read_answer(client)[0] == 200
        seconds_until_closed(client)
    assert server.resident_mib() - before < 8


def test_one_connection_serves_200_requests(server: ServerProcess) -> None:
    with connect(server) as client:
        for number in range(200):
            client.sendall(HEALTH if number % 10 else post("/generate", prompt="a", max_tokens=1))
            assert read_answer(client)[0] == 200


# -- clients that leave, or do not read --------------------------------------------------------------------------------


def test_unread_answers_time_out_and_free_their_blocks(server: ServerProcess) -> None:
    before, was_given_up = server.resident_mib(), num_refused(server, "send_timeout")
    with ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(connect(server, receive_buffer=2048))
            client.sendall(post("/generate_stream", prompt="a", max_tokens=1500, ignore_eos=True, logprobs=20))
        deadline = time.monotonic() + 120
        while num_refused(server, "send_timeout") - was_given_up < 16:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.wait_until_at_rest()
    assert server.resident_mib() - before < 32


@pytest.mark.parametrize("way", ["reset", "close", "shutdown", "pipelined"])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_disconnect_frees_the_blocks(server: ServerProcess, path: str, way: str) -> None:
    """A half-close counts as a disconnect: see servekit/server/http_protocol.py."""
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
        assert server.metric("servekit_generation_tokens_total") - left < 200, "it went on after the disconnect"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_disconnect_after_a_large_body_frees_the_blocks(server: ServerProcess, path: str) -> None:
    """The body arrives in one piece, which pauses reading; a connection that is not read notices no disconnect."""
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
        assert server.metric("servekit_generation_tokens_total") - left < 200, "it went on after the disconnect"
