"""Use the mask process from the worker: start it, ask for masks, notice its end.

No function here waits longer than its caller allows. A process that is lost, or does not answer, is replaced. The state
of the new process is derived from the token table.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from servekit.protocol.framing import MessageReceiver, MessageSender, make_pipe
from workers.grammar.messages import HEADER_BYTES, AskMasks, FromMaskProcess, Mask, Ready, mask_bytes

log = logging.getLogger("servekit.worker")

START_TIMEOUT_S = 60.0  # for imports and a large tokenizer, on a busy machine
ANSWER_TIMEOUT_S = 10.0  # without an answer while one is due; a piece of work takes about ten milliseconds
# Longest time that counts between two checks of the process. When the container is paused, both processes are. In this
# case the time that has passed at the next check does not mean that the process is silent.
MAX_CHECK_INTERVAL_S = 1.0
MAX_UNREAD_BYTES = 64 * 2**20  # of messages that the process has not read
MAX_FAILED_STARTS = 3  # in a row; after that, requests with grammars fail until a start succeeds
MAX_START_DELAY_S = 30.0
KILLED = -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Lost:
    """A process has ended. `sequence` is the sequence that it was working for; None if it was idle."""

    sequence: int | None
    is_crash: bool  # False: it was killed, by another program or because it did not answer


class MaskProcess:
    """One process at a time. `incarnation` counts them, because a new process has no state of the one before it."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_slots: int,
        max_drafts: int = 0,
        for_slow_tenants: bool = False,
    ) -> None:
        self.incarnation = 0
        self._arguments = ["--tokenizer", str(tokenizer_file), "--vocab-size", str(vocab_size)]
        self._arguments += ["--eos-token-ids", *map(str, eos_token_ids)] if eos_token_ids else []
        self._arguments += ["--max-drafts", str(max_drafts)]
        self._arguments += ["--for-slow-tenants"] if for_slow_tenants else []
        shape = (num_slots, 1 + max_drafts, mask_bytes(vocab_size) // 4)
        size = HEADER_BYTES + 4 * math.prod(shape)
        # Not a file in /dev/shm, because containers may not have it, or it may be full.
        self._masks_fd = os.memfd_create("servekit-masks")
        os.ftruncate(self._masks_fd, size)
        weakref.finalize(self, os.close, self._masks_fd)
        self._shared = mmap.mmap(self._masks_fd, size)
        self._current = np.frombuffer(self._shared, dtype=np.int64, count=1)
        masks = np.frombuffer(self._shared, dtype=np.int32, offset=HEADER_BYTES)
        # By slot: the mask of the next token, and the masks of the tokens after its drafts.
        self.masks: NDArray[np.int32] = masks.reshape(shape)
        self._process: subprocess.Popen[bytes] | None = None
        self._asks: MessageSender[AskMasks]
        self._answers: MessageReceiver[FromMaskProcess]
        self._is_ready = False
        self._due: dict[int, int] = {}  # sequences whose masks are being computed, and the numbers of their last asks
        self._silent_s = 0.0  # time without an answer while one is due, up to the last check
        self._checked_s = 0.0
        self._num_failed_starts = 0
        self._start_not_before_s = 0.0
        self._refusal = ""  # why the model's tokenizer cannot be used

    @property
    def refusal(self) -> str:
        """Why no mask can be computed at present; empty if masks can be computed, or if that is not known yet."""
        if self._refusal or self._num_failed_starts < MAX_FAILED_STARTS:
            return self._refusal
        return (
            f"the process that computes token masks did not start {self._num_failed_starts} times. Requests without a "
            "grammar are not affected; the operator finds the cause in the server's log"
        )

    @property
    def is_running(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self._process is not None

    def ensure_started(self) -> bool:
        """Start the process if there is none. Returns whether there is one, without a wait until it is ready."""
        if self._process is None and not self._refusal and time.monotonic() >= self._start_not_before_s:
            self._start()
        return self._process is not None

    def _start(self) -> None:
        asked, asks = make_pipe()
        answered, answers = make_pipe()
        descriptors = (asked.fileno(), answers.fileno(), self._masks_fd)
        names = ("--ask-fd", "--answer-fd", "--masks-fd")
        command = [sys.executable, "-P", "-m", "workers.grammar.process", "--parent-pid", str(os.getpid())]
        command += [word for pair in zip(names, map(str, descriptors), strict=True) for word in pair]
        self._current[0] = 0
        try:
            process = subprocess.Popen(
                [*command, *self._arguments],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            log.warning("the mask process cannot be started: %s", error)
            self._count_failed_start()
            return
        finally:
            asked.close()
            answers.close()
        os.set_blocking(asks.fileno(), False)
        os.set_blocking(answered.fileno(), False)
        self._process = process
        self._asks, self._answers = MessageSender(asks), MessageReceiver(answered, FromMaskProcess)
        self._end = weakref.finalize(self, _end, process)
        self.incarnation += 1
        self._is_ready = False
        self._due.clear()
        self._end_silence()

    def ask(self, message: AskMasks) -> None:
        """Send a message without waiting until the process reads it. `receive` reports the loss of the process."""
        if not self._due:
            self._end_silence()
        self._due.update((ask.sequence, ask.number) for ask in message.asks)
        with contextlib.suppress(BrokenPipeError):
            self._asks.send_ready(message)

    def forget(self, sequence: int) -> None:
        """Stop expecting a mask of a sequence. The process drops the sequence when another one begins in its slot."""
        self._due.pop(sequence, None)

    def receive(self, timeout_s: float) -> list[Mask] | Lost:
        """Wait for a mask for at most `timeout_s`. Returns the masks that have arrived, or the loss of the process."""
        assert self._process is not None
        try:
            if self._asks.num_unsent:
                with contextlib.suppress(BrokenPipeError):
                    self._asks.flush()
            if timeout_s > 0.0:
                wait_for_any([self], timeout_s)
            return self._read()
        except BlockingIOError:  # nothing has arrived
            return self._check()
        except (EOFError, ConnectionError):
            return self._mark_lost()

    def register(self, poll: select.poll) -> None:
        """Let `poll` wait for an answer, or until unsent bytes can be sent."""
        poll.register(self._answers.fileno(), select.POLLIN)
        if self._asks.num_unsent:
            poll.register(self._asks.fileno(), select.POLLOUT)

    def _read(self) -> list[Mask]:
        """Return the masks that have arrived. Raises BlockingIOError if nothing has."""
        masks: list[Mask] = []
        messages = self._answers.receive_ready()
        self._end_silence()
        for message in messages:
            if isinstance(message, Ready):
                self._is_ready, self._refusal = not message.refusal, message.refusal
                self._num_failed_starts = 0
            else:
                masks += message.masks
        for mask in masks:
            if self._due.get(mask.sequence) == mask.number:
                del self._due[mask.sequence]
        return masks

    def _end_silence(self) -> None:
        self._silent_s, self._checked_s = 0.0, time.monotonic()

    def _check(self) -> list[Mask] | Lost:
        """End a process that does not answer."""
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._checked_s, MAX_CHECK_INTERVAL_S)
        self._checked_s = now_s
        is_late = bool(self._due) and self._silent_s > (ANSWER_TIMEOUT_S if self._is_ready else START_TIMEOUT_S)
        if not is_late and self._asks.num_unsent < MAX_UNREAD_BYTES:
            return []
        log.warning(
            "the mask process has not answered for %.0f s, or %d bytes are not sent to it (limits: %g s, %d bytes)",
            self._silent_s,
            self._asks.num_unsent,
            ANSWER_TIMEOUT_S if self._is_ready else START_TIMEOUT_S,
            MAX_UNREAD_BYTES,
        )
        return self._mark_lost()

    def _mark_lost(self) -> Lost:
        """Reap the process. Returns which sequence it was working on, and whether it crashed."""
        process, self._process = self._process, None
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)  # its pipe is closed, so it will exit soon; the exit code shows why
        exit_code = process.poll()
        self._end()
        self._asks.close()
        self._answers.close()
        if not self._is_ready:
            self._count_failed_start()
        sequence = int(self._current[0]) or None
        if self._refusal:
            log.warning("requests with grammars will fail: %s", self._refusal)
        else:
            log.warning("the mask process has ended (exit code %s), and is replaced", exit_code)
        return Lost(sequence, is_crash=exit_code is not None and exit_code != KILLED)

    def _count_failed_start(self) -> None:
        self._num_failed_starts += 1
        delay_s = min(MAX_START_DELAY_S, 2.0 ** (self._num_failed_starts - 2))
        self._start_not_before_s = time.monotonic() + delay_s

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process = None
            self._end()
            self._asks.close()
            self._answers.close()


def wait_for_any(processes: Iterable[MaskProcess], timeout_s: float) -> None:
    """Wait for at most `timeout_s` until one of the running processes has something to receive."""
    poll = select.poll()
    for process in processes:
        process.register(poll)
    poll.poll(max(0.0, 1e3 * timeout_s))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
