"""`python -m servekit.sandbox.process`: run jobs whose input clients wrote, in a process that the server may kill.

Chat templates are programs, and grammars can be enormous. The server limits the time of each job, and the kernel limits
the memory of this process. A job that exceeds either ends this process, and nothing else.
"""

from __future__ import annotations

import argparse
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from servekit.protocol.child_process import die_with_parent, ignore_signals
from servekit.protocol.framing import MessageReceiver, MessageSender, adopt_reader, adopt_writer
from servekit.sandbox.jobs import CompileGrammar, Done, Job, Outcome, Refused, RenderChat

STACK_BYTES = 4 * 2**20
DESCRIPTION = "Run jobs whose input clients wrote, in a process that the server may kill."


def main(argv: Sequence[str] | None = None) -> int:
    """Read jobs from standard input and write outcomes to standard output, as framed messages."""
    parser = argparse.ArgumentParser(prog="python -m servekit.sandbox.process", description=DESCRIPTION)
    parser.add_argument("--parent-pid", type=int, required=True, help="the server's process id; this exits with it")
    parser.add_argument("--memory-bytes", type=int, required=True, help="memory for jobs, beyond that of the start")
    parser.add_argument("--tokenizer", help="the model's tokenizer.json: compile grammars; without it: render chats")
    parser.add_argument("--vocab-size", type=int, default=0, help="number of the model's logits")
    parser.add_argument("--eos-token-ids", type=int, nargs="*", default=[])
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    jobs = MessageReceiver[Job](adopt_reader(sys.stdin.fileno()), Job)
    outcomes = MessageSender[Outcome](adopt_writer(sys.stdout.fileno()))
    try:
        work = _grammar_work(arguments) if arguments.tokenizer else _chat_work()
    except Exception as error:  # of any library; the message is for people
        outcomes.send(Refused(str(error)))
        return 2
    limit_memory(arguments.memory_bytes)
    # The stack is smaller than the worker's: a grammar that overflows a stack overflows this one, before the worker's.
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=serve, args=(work, jobs, outcomes))
    serving.start()
    serving.join()
    return 0


def _chat_work() -> Callable[[Job], Outcome]:
    from servekit.sandbox.chat_template import render_chat

    def work(job: Job) -> Outcome:
        assert isinstance(job, RenderChat)
        return render_chat(job)

    return work


def _grammar_work(arguments: argparse.Namespace) -> Callable[[Job], Outcome]:
    from servekit.protocol.grammar_matcher import grammar_tokenizer
    from servekit.sandbox.compile_grammar import compile_grammar

    tokenizer = grammar_tokenizer(Path(arguments.tokenizer), arguments.vocab_size, arguments.eos_token_ids)

    def work(job: Job) -> Outcome:
        assert isinstance(job, CompileGrammar)
        return compile_grammar(job, tokenizer)

    return work


def limit_memory(extra_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `extra_bytes`."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(work: Callable[[Job], Outcome], jobs: MessageReceiver[Job], outcomes: MessageSender[Outcome]) -> None:
    """Run one job after the other, until the server closes the pipe."""
    outcomes.send(Done("ready"))
    while True:
        try:
            outcome = work(jobs.receive())
        except EOFError:
            return
        except MemoryError:
            outcome = Refused("it takes more memory than a request may have")
        except RecursionError:
            outcome = Refused("it is nested too deeply")
        except Exception as error:
            outcome = Refused(f"{type(error).__name__}: {error}")
        outcomes.send(outcome)


if __name__ == "__main__":
    sys.exit(main())
