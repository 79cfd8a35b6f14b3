"""Claims about `servekit chat` and `servekit top` without a terminal: in pipes, with closed streams, behind proxies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.cli import main
from tests.support.default_signals import heed_interrupts
from tests.support.scripted_server import DONE, ScriptedServer, frame, piece, scripted_server
from tests.support.server_process import ServerProcess, serving

CHAT = "/v1/chat/completions"
NEVER = threading.Event()
STATE = frame("demo").partition(b"data: ")[2].rstrip()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


def piped(url: str, text: str, *flags: str, command: str = "chat") -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "servekit", command, url, *flags]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=60)


def test_chat_answers_each_line_of_a_pipe(scripted: ScriptedServer) -> None:
    scripted.scripts[CHAT] = [[piece("o\x1bne"), DONE], [piece("two\n"), DONE], [piece("three"), DONE]]
    done = piped(scripted.url, "a\\\nb\n\nc\n/new\nd")
    assert (done.returncode, done.stdout, done.stderr) == (0, "o␛ne\ntwo\nthree\n", "")
    assert scripted.chats() == [
        ["user: a\nb"],
        ["user: a\nb", "assistant: o\x1bne", "user: c"],
        ["user: d"],
    ]


def test_the_first_error_ends_a_chat_in_a_pipe(scripted: ScriptedServer) -> None:
    scripted.scripts[CHAT] = [[piece("yes"), DONE], [piece("some")]]
    done = piped(scripted.url, "a\nb\nc\n")
    assert (done.returncode, done.stdout) == (1, "yes\nsome")
    assert done.stderr == "servekit: the answer is incomplete: the server closed the connection\n"
    assert len(scripted.chats()) == 2


@pytest.mark.parametrize("asks", [False, True])
def test_sigint_ends_a_chat_in_a_pipe_at_any_point(scripted: ScriptedServer, asks: bool) -> None:
    """While the program waits for its input, in C, and while it waits for the server."""
    scripted.scripts[CHAT] = [[piece("yes"), DONE], [NEVER]]
    command = [sys.executable, "-m", "servekit", "chat", scripted.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=heed_interrupts) as process:
        assert process.stdin is not None and process.stdout is not None
        print("a", file=process.stdin, flush=True)
        assert process.stdout.readline() == "yes\n"
        if asks:
            print("b", file=process.stdin, flush=True)
            scripted.wait_for(num_asked=2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


@pytest.mark.parametrize("command", ["chat", "top"])
def test_a_failed_write_is_reported_in_one_line(scripted: ScriptedServer, command: str) -> None:
    scripted.scripts |= {CHAT: [[piece("yes"), DONE]], "/ui/state": [[STATE]]}
    with Path("/dev/full").open("w") as full:
        arguments = [sys.executable, "-m", "servekit", command, scripted.url]
        done = subprocess.run(arguments, input="a\n", stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "servekit: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize(("name", "message"), [("stdin", "standard input is closed"), ("stdout", "standard output is")])
@pytest.mark.parametrize("command", ["chat", "top"])
def test_a_closed_standard_stream_is_reported(
    command: str, name: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, name, None)  # as Python has it after `<&-` and `>&-`
        assert main([command, "http://127.0.0.1:1"]) == 1
    assert message in capsys.readouterr().err


ENDLESS = b"x" * (9 << 20)


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (200, {}, ENDLESS, "/ui/state is longer than 8,388,608 bytes"),
        (502, {}, ENDLESS, "answered 502 Bad Gateway"),
        (
            200,
            {"Content-Encoding": "gzip"},
            b"\x1f\x8b",
            "answered with Content-Encoding gzip, which servekit does not accept",
        ),
    ],
    ids=["endless", "endless refusal", "compressed"],
)
def test_answers_are_read_up_to_a_limit_only(
    scripted: ScriptedServer,
    status: int,
    headers: dict[str, str],
    body: bytes,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted.scripts["/ui/state"] = [[body]]
    scripted.statuses["/ui/state"] = status, headers
    assert main(["top", scripted.url]) == 1
    assert message in capsys.readouterr().err


def test_a_proxy_is_used_for_other_machines_only_and_named_in_errors(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.scripts["/ui/state"] = [[STATE]]
    for name in ("http_proxy", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@127.0.0.1:1")
    assert main(["top", scripted.url]) == 0
    capsys.readouterr()
    assert main(["top", "http://server.invalid:8000"]) == 1
    message = capsys.readouterr().err
    assert "no server answers at http://server.invalid:8000 through the proxy http://127.0.0.1:1;" in message
    assert "secret" not in message
    for unusable in ("socks5://127.0.0.1:1", "nothing://127.0.0.1:1"):  # httpx2 lacks a package for the first
        monkeypatch.setenv("HTTP_PROXY", unusable)
        assert main(["top", "http://server.invalid:8000"]) == 2
        assert "the proxy (HTTP_PROXY and similar variables)" in capsys.readouterr().err
        assert main(["top", scripted.url]) == 0


def test_top_prints_one_frame_to_a_pipe(server: ServerProcess) -> None:
    done = piped(server.url, "", command="top")
    assert done.returncode == 0 and not done.stderr
    assert "\x1b" not in done.stdout and "demo  ready\n" in done.stdout and "sequences" in done.stdout


def test_api_keys_come_from_flag_or_variable_and_missing_ones_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving("--model", "sim:instant", log=tmp_path / "log", environment={"SERVEKIT_API_KEY": "one,two"}) as server:
        assert main(["top", server.url]) == 1 and "requires an API key" in capsys.readouterr().err
        assert main(["top", server.url, "--api-key", "three"]) == 1
        assert "rejected the API key" in capsys.readouterr().err
        assert main(["top", server.url, "--api-key", "two"]) == 0
        monkeypatch.setenv("SERVEKIT_API_KEY", "one,two")
        assert main(["top", server.url]) == 0
