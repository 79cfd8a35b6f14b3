"""Write log lines to standard error in a thread, so that nothing else waits when standard error is not read.

Standard error is often a pipe. When no process reads it, it is full after 64 KiB, and the next write waits without
limit. If the event loop's thread did that write, all clients would wait.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import traceback
from queue import SimpleQueue

STANDARD_ERROR = 2
MAX_QUEUED_BYTES = 2**20  # some 8,000 lines; a burst of a second is below a tenth of it
MAX_BATCH_BYTES = 2**16  # the usual size of a pipe; lines that are queued together are written together
FLUSH_TIMEOUT_S = 1.0  # at exit; if standard error is read, writing a whole queue takes milliseconds


class LogWriter(logging.Handler):
    """Formats records where they are logged, and writes them in order in a thread of its own.

    The queue has a bound in bytes. Lines that are logged while it is full are dropped and counted, and a line in their
    place reports their number. The oldest are kept, because what went wrong first explains the rest.

    Trade-off: a process that is killed loses the lines of its last milliseconds. At a regular exit they are written.

    No lock is shared with the thread: records are logged in signal handlers, too, which must not wait for it.
    """

    def __init__(self, file_descriptor: int = STANDARD_ERROR) -> None:
        super().__init__()
        self._file_descriptor = file_descriptor
        # Counters since the start. Callers write those of the first line, and the thread those of the second.
        self._num_refused = self._num_queued_bytes = 0
        self._num_failed = self._num_finished_bytes = self._num_reported = 0
        self._lines: SimpleQueue[tuple[int, bytes]] = SimpleQueue()  # lines refused before this one; the line
        threading.Thread(target=self._run, daemon=True, name="log writer").start()

    @property
    def num_dropped(self) -> int:
        """Lines that were not written, because the queue was full or because writing failed."""
        return self._num_refused + self._num_failed

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_full():
            self._num_refused += 1  # before formatting, which takes most of the time of a line
            return
        try:
            text = self.format(record)
        except Exception:  # an error in a log call must not end the request
            text = traceback.format_exc().rstrip()
        self.write(text)

    def write(self, text: str) -> None:
        """Queue a line that is formatted already. Never waits."""
        if self._is_full():
            self._num_refused += 1
            return
        line = text.encode(errors="backslashreplace") + b"\n"
        self._num_queued_bytes += len(line)
        self._lines.put((self._num_refused, line))

    def _is_full(self) -> bool:
        return self._num_queued_bytes - self._num_finished_bytes >= MAX_QUEUED_BYTES

    def flush(self) -> None:
        """Wait until all queued lines are written, for at most FLUSH_TIMEOUT_S. `logging` calls it at exit."""
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        while self._num_finished_bytes < self._num_queued_bytes and time.monotonic() < deadline_s:
            time.sleep(0.001)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            num_refused, line = self._lines.get()
            batch, num_lines, num_bytes = bytearray(), 0, 0
            num_reported = self._num_reported
            while True:
                batch += self._report(num_refused) + line
                num_lines += 1
                num_bytes += len(line)
                if self._lines.empty() or len(batch) >= MAX_BATCH_BYTES:
                    break
                num_refused, line = self._lines.get()
            if not self._write(batch):
                self._num_failed += num_lines
                self._num_reported = num_reported
            elif self._lines.empty():
                self._write(self._report(self._num_refused))  # there may be no later line that reports it
            self._num_finished_bytes += num_bytes

    def _report(self, num_refused: int) -> bytes:
        """Return the line that reports the lines dropped since the last report; empty if there are none."""
        num_dropped = num_refused + self._num_failed
        if num_dropped == self._num_reported:
            return b""
        text = "%d log lines were dropped: standard error was not read, or could not be written"
        arguments = (num_dropped - self._num_reported,)
        self._num_reported = num_dropped
        return (
            self.format(logging.LogRecord("servekit", logging.WARNING, "", 0, text, arguments, None)).encode() + b"\n"
        )

    def _write(self, data: bytes | bytearray) -> bool:
        """Write all of `data`, however long that takes. Returns False if that fails."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._file_descriptor, rest) :]
            except BlockingIOError:  # another program with the same terminal or pipe has made it non-blocking
                poll = select.poll()
                poll.register(self._file_descriptor, select.POLLOUT)
                poll.poll()
            except OSError:  # a full disk, a closed pipe
                return False
        return True
