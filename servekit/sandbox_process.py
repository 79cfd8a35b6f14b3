"""`python -m servekit.sandbox_process`: work through what clients wrote, in a process that may be killed for it.

Templates are programs and grammars can be enormous. Whoever waits for this process gives it seconds, and the kernel
gives it no more memory than it was told; what it cannot do within that ends it, and nobody else notices.
"""

from __future__ import annotations

import argparse
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from servekit.processes import die_with_parent, ignore_signals
from servekit.sandbox_jobs import CompileGrammar, Done, Job, Outcome, Refused, RenderChat

STACK_BYTES = 4 * 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Answer jobs from standard input on standard output, each a frame of four bytes of length and msgpack."""
    parser = argparse.ArgumentParser(prog="python -m servekit.sandbox_process", description=__doc__.splitlines()[0])
    parser.add_argument("--parent-pid", type=int, required=True, help="the server; this process dies with it")
    parser.add_argument("--memory-bytes", type=int, required=True, help="what a job may take beyond what is loaded")
    parser.add_argument("--tokenizer", help="the model's tokenizer.json: compile grammars; without it, render chats")
    parser.add_argument("--vocab-size", type=int, default=0, help="logits that the model has")
    parser.add_argument("--eos-token-ids", type=int, nargs="*", default=[])
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    try:
        work = _grammar_work(arguments) if arguments.tokenizer else _chat_work()
    except Exception as error:  # whatever the libraries think of it, it is for a person to read
        _answer(sys.stdout.buffer, Refused(str(error)))
        return 2
    limit_memory(arguments.memory_bytes)
    # With a smaller stack than the worker's: what overflows a stack overflows it here, and kills nobody else.
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=serve, args=(work, sys.stdin.buffer, sys.stdout.buffer))
    serving.start()
    serving.join()
    return 0


def _chat_work() -> Callable[[Job], Outcome]:
    from servekit.chat_template import render_chat

    def work(job: Job) -> Outcome:
        assert isinstance(job, RenderChat)
        return render_chat(job)

    return work


def _grammar_work(arguments: argparse.Namespace) -> Callable[[Job], Outcome]:
    from servekit.grammar import compile_grammar, grammar_tokenizer

    tokenizer = grammar_tokenizer(Path(arguments.tokenizer), arguments.vocab_size, arguments.eos_token_ids)

    def work(job: Job) -> Outcome:
        assert isinstance(job, CompileGrammar)
        return compile_grammar(job, tokenizer)

    return work


def limit_memory(extra_bytes: int) -> None:
    """Let this process grow by so many bytes, and no further."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(work: Callable[[Job], Outcome], requests: BinaryIO, answers: BinaryIO) -> None:
    """One job after the other, until the server closes its end."""
    decode = msgspec.msgpack.Decoder(Job).decode
    _answer(answers, Done("ready"))
    while len(head := requests.read(4)) == 4:
        try:
            outcome = work(decode(requests.read(int.from_bytes(head, "big"))))
        except MemoryError:
            outcome = Refused("it takes more memory than a request may have")
        except RecursionError:
            outcome = Refused("it is nested too deeply")
        except Exception as error:
            outcome = Refused(f"{type(error).__name__}: {error}")
        _answer(answers, outcome)


def _answer(answers: BinaryIO, outcome: Outcome) -> None:
    frame = msgspec.msgpack.encode(outcome)
    answers.write(len(frame).to_bytes(4, "big") + frame)
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
