"""Format log lines of the server and its workers: as text for people, or as one JSON object per line.

Logged values are escaped, so that they cannot end a line, begin another one, or send control codes to a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from servekit.protocol.log_writer import LogWriter

log = logging.getLogger("servekit")

# Control characters, Unicode line separators, characters that reverse the direction of text, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WORD = re.compile(r'[^\s"=\\]+')


def configure_logging(level: str, log_format: str = "text") -> None:
    """Write log lines to standard error, including Python warnings and uncaught exceptions.

    A log call never waits, also if standard error is not read.
    """
    handler = LogWriter()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def logs_json() -> bool:
    """Whether log lines are JSON, so that nothing else may be written to standard error."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def num_dropped_lines() -> int:
    """Return how many log lines of this process were dropped since its start."""
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))


def write_line(text: str) -> None:
    """Write a line to standard error, after pending log lines. Does nothing if that fails."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.write(text)
            return
    with suppress(OSError):  # standard error can be closed, or a terminal that is gone
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """The `extra` argument of a log call: named values that are logged with the message."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; then the fields that have a value, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [f"{clock} {record.levelname:<7} {record.name} ", escaped(record.getMessage())]
        parts += [
            f"{name}={_quoted(value)}" for name, value in getattr(record, "fields", {}).items() if _has_value(value)
        ]
        if record.exc_info:
            # Indented, so that no line of it looks like a log line.
            lines = self.formatException(record.exc_info).split("\n")
            parts += ["".join(f"\n    {escaped(line)}" for line in lines)]
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII: `time` in UTC, `level`, `logger`, `message`, the fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def escaped(text: str) -> str:
    """Return a text without control codes, for a log or a terminal: each is written as an escape sequence of Python."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _has_value(value: Any) -> bool:
    return bool(value) or (value == 0 and value is not False)


def _quoted(value: Any) -> str:
    """The value of a field, quoted unless it is one plain word."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text.isascii() and text.isprintable() and _WORD.fullmatch(text) else json.dumps(text)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    log.critical("uncaught %s", kind.__name__, exc_info=(kind, error or kind(), traceback))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    _log_uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
