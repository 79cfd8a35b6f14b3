"""`python -m workers.grammar.process`: compute token masks, in a process that may be killed.

A worker starts it, and passes it two pipes and shared memory as open file descriptors. Grammars come from clients, and
the library that follows them is native code. If that code uses too much memory, time or stack, only this process and
one request fail.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from servekit.protocol.child_process import die_with_parent, ignore_signals, limit_address_space
from servekit.protocol.framing import MessageReceiver, MessageSender, adopt_reader, adopt_writer
from servekit.protocol.grammar_matcher import grammar_tokenizer
from workers.grammar.budgets import MAX_PIECE_S
from workers.grammar.matchers import MAX_BYTES, GrammarMatchers
from workers.grammar.messages import HEADER_BYTES, AskMasks, FromMaskProcess, Mask, Masks, Ready, mask_bytes

# Priorities: if processors are scarce, the model runs first, and slow grammars last.
NICENESS = 5
NICENESS_OF_SLOW = 10
HELD_BACK_S = 0.0005  # answers are sent together, but none waits much longer than this
POLL_INTERVAL_S = 0.0002  # between two checks for new messages while there is work


def main(argv: Sequence[str] | None = None) -> int:
    """Read what steps ask for from one pipe, and write answers to the other, until the worker closes them."""
    parser = argparse.ArgumentParser(prog="python -m workers.grammar.process")
    parser.add_argument("--ask-fd", type=int, required=True, help="file descriptor to read messages from")
    parser.add_argument("--answer-fd", type=int, required=True, help="file descriptor to write answers to")
    parser.add_argument("--masks-fd", type=int, required=True, help="file descriptor of the shared memory")
    parser.add_argument("--parent-pid", type=int, required=True, help="the worker's process id; this exits with it")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's tokenizer.json")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of the model's logits")
    parser.add_argument("--eos-token-ids", type=int, nargs="*", default=[])
    parser.add_argument("--max-drafts", type=int, default=0, help="masks of a sequence behind its first one")
    parser.add_argument("--for-slow-tenants", action="store_true", help="a piece of work may take long")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    os.nice(NICENESS_OF_SLOW if arguments.for_slow_tenants else NICENESS)
    asks = MessageReceiver[AskMasks](adopt_reader(arguments.ask_fd), AskMasks)
    answers = MessageSender[FromMaskProcess](adopt_writer(arguments.answer_fd))
    try:
        tokenizer = grammar_tokenizer(arguments.tokenizer, arguments.vocab_size, arguments.eos_token_ids)
    except (ValueError, KeyError, OSError) as error:
        answers.send(Ready(refusal=str(error)))
        return 2
    limit_address_space(4 * MAX_BYTES)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # because the library writes parts of grammars there
    answers.send(Ready())
    with contextlib.suppress(EOFError, BrokenPipeError):
        shared = mmap.mmap(arguments.masks_fd, 0)
        matchers = GrammarMatchers(
            tokenizer,
            ctypes.addressof(ctypes.c_char.from_buffer(shared)) + HEADER_BYTES,
            mask_bytes(arguments.vocab_size),
            max_drafts=arguments.max_drafts,
            max_piece_s=float("inf") if arguments.for_slow_tenants else MAX_PIECE_S,
        )
        serve(matchers, ctypes.c_int64.from_buffer(shared), asks, answers)
    return 0


def serve(
    matchers: GrammarMatchers,
    current: ctypes.c_int64,
    asks: MessageReceiver[AskMasks],
    answers: MessageSender[FromMaskProcess],
) -> None:
    """Do the work of all sequences piece by piece. Raises EOFError and BrokenPipeError when the worker is gone.

    `current` is in the shared memory: the number of the sequence that is worked on, 0 for none.
    """
    done: list[Mask] = []
    done_s = polled_s = 0.0  # when the first of them was; when the process looked for messages
    poll = select.poll()
    poll.register(asks.fileno(), select.POLLIN)
    while True:
        sequence = matchers.next_sequence()
        if done and (sequence is None or sequence.expected_s + time.monotonic() - done_s > HELD_BACK_S):
            answers.send(Masks(tuple(done)))
            done.clear()
        if sequence is not None:
            current.value = sequence.number
            if (mask := matchers.advance(sequence)) is not None:
                done_s = done_s if done else time.monotonic()
                done.append(mask)
            current.value = 0
        if sequence is None or time.monotonic() - polled_s > POLL_INTERVAL_S:
            if poll.poll(0 if sequence is not None else None):
                for message in asks.receive_ready():
                    matchers.accept(message)
            polled_s = time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
