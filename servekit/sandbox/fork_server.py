"""`python -m servekit.sandbox.fork_server`: import what jobs need, then fork the processes that run them.

Starting an interpreter with these libraries takes a second. Forking this process takes two milliseconds, and the forked
processes share its memory. So a process that runs jobs can be killed at any time, and costs little while it is idle.

This process never reads what clients write. It has only one thread, because in a forked process only the forking thread
continues.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from servekit.protocol.child_process import die_with_parent, ignore_signals
from servekit.protocol.light_imports import light_imports
from servekit.requests.generation import GrammarKind
from servekit.sandbox.jobs import (
    CompileGrammar,
    End,
    Ended,
    Fork,
    Forked,
    ForkServerReady,
    FromForkServer,
    Outcome,
    Refused,
    RenderChat,
    ToForkServer,
)
from servekit.sandbox.process import Handlers, run_jobs

MAX_REQUEST_BYTES = 4096
REAP_INTERVAL_S = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Answer messages on standard input, a SOCK_SEQPACKET socket, until the server closes it."""
    parser = argparse.ArgumentParser(
        prog="python -m servekit.sandbox.fork_server", description="Fork processes that run what clients wrote."
    )
    parser.add_argument("--parent-pid", type=int, required=True, help="the server's process id; this exits with it")
    parser.add_argument("--memory-bytes", type=int, required=True, help="memory for jobs, beyond that of the start")
    parser.add_argument("--tokenizer", help="the model's tokenizer.json, for grammars")
    parser.add_argument("--vocab-size", type=int, default=0, help="number of the model's logits")
    parser.add_argument("--eos-token-ids", type=int, nargs="*", default=[])
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    handlers: Handlers = {}
    warnings = []
    for kind, make in ((RenderChat, _chat_handler), (CompileGrammar, _grammar_handler)):
        try:
            handlers[kind] = make(arguments)
        except Exception as error:  # from any library; the message is for people
            handlers[kind] = _refusing(str(error))
            warnings.append(str(error))
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to every page with objects, and so copy these pages
    _send(control, ForkServerReady(warnings))
    killed: set[int] = set()  # pids that are not reaped yet
    while message := _receive(control, killed):
        request, descriptors = message
        if isinstance(request, Fork):
            pid = os.fork()
            if pid == 0:
                _run_child(handlers, control, descriptors[0], arguments.memory_bytes)
            os.close(descriptors[0])
            _send(control, Forked(pid))
        else:
            _send(control, Ended(_end(request, killed)))
    return 0


def _run_child(handlers: Handlers, control: socket.socket, channel: int, memory_bytes: int) -> None:
    """Run jobs in this process, which has just been forked. Its exit runs none of the parent's cleanup code."""
    exit_code = 1
    try:
        parent_pid = os.getppid()
        control.close()
        os.close(sys.stdin.fileno())
        run_jobs(handlers, channel, parent_pid, memory_bytes)
        exit_code = 0
    finally:
        os._exit(exit_code)


def _end(request: End, killed: set[int]) -> int | None:
    """Return the exit code of a child, which is reaped; None if it has not exited.

    A killed child takes some time to free its memory. Other children are forked in the meantime.
    """
    reaped, status = os.waitpid(request.pid, os.WNOHANG)
    if reaped:
        return os.waitstatus_to_exitcode(status)
    if request.kill:
        os.kill(request.pid, signal.SIGKILL)  # not reaped yet, so no other process has this pid
        killed.add(request.pid)
    return None


def _receive(control: socket.socket, killed: set[int]) -> tuple[ToForkServer, list[int]] | None:
    """Return the next request and its file descriptors; None if the server has closed the socket."""
    while True:
        killed -= {pid for pid in killed if os.waitpid(pid, os.WNOHANG)[0]}
        control.settimeout(REAP_INTERVAL_S if killed else None)
        with contextlib.suppress(TimeoutError):
            data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
            return (_decode(data), descriptors) if data else None


def _send(control: socket.socket, message: FromForkServer) -> None:
    with contextlib.suppress(BrokenPipeError):  # the server has closed the socket; the next read reports this
        control.send(msgspec.msgpack.encode(message))


def _chat_handler(_: argparse.Namespace) -> Callable[[RenderChat], Outcome]:
    with light_imports():
        from servekit.sandbox.chat_template import render_chat

    # The first conversation imports more modules and fills caches. After this one, forked processes share them.
    render_chat(RenderChat("{{ messages[0].content }}", True, False, {}, [{"role": "user", "content": "x"}]))
    return render_chat


def _grammar_handler(arguments: argparse.Namespace) -> Callable[[CompileGrammar], Outcome]:
    from servekit.protocol.grammar_matcher import grammar_tokenizer
    from servekit.sandbox.compile_grammar import compile_grammar

    tokenizer = grammar_tokenizer(Path(arguments.tokenizer), arguments.vocab_size, arguments.eos_token_ids)
    compile_grammar(CompileGrammar(GrammarKind.JSON, ""), tokenizer)
    return lambda job: compile_grammar(job, tokenizer)


def _refusing(message: str) -> Callable[[object], Outcome]:
    return lambda job: Refused(message, "not_supported")


_decode = msgspec.msgpack.Decoder(ToForkServer).decode

if __name__ == "__main__":
    sys.exit(main())
