"""How log lines look, in the server and in its workers: for people, or a JSON object each.

Whatever is logged, nothing in it can end its line, begin another one, or speak to a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

log = logging.getLogger("servekit")

# Control characters, the line ends that only Unicode knows, what reverses the direction of text, and halves of pairs.
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WORD = re.compile(r'[^\s"=\\]+')


def configure_logging(level: str, log_format: str = "text") -> None:
    """Send lines to standard error, also about warnings and about what nobody caught."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda told: _log_uncaught(told.exc_type, told.exc_value, told.exc_traceback)


def is_for_programs() -> bool:
    """Whether standard error is to have JSON on every line."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """`extra` of a log call: what stands beside the message, each by its own name."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """Time, level, which part, what; then the fields that say something, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        told = [f"{clock} {record.levelname:<7} {record.name} ", _harmless(record.getMessage())]
        told += [
            f"{name}={_word(value)}" for name, value in getattr(record, "fields", {}).items() if _says_something(value)
        ]
        if record.exc_info:
            # Indented, so that no line of it can pass for one of the log's own.
            lines = self.formatException(record.exc_info).split("\n")
            told += ["".join(f"\n    {_harmless(line)}" for line in lines)]
        return " ".join(told)


class JsonFormatter(logging.Formatter):
    """One object in a line, in ASCII: `time` in UTC, `level`, `logger`, `message`, the fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _harmless(text: str) -> str:
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _says_something(value: Any) -> bool:
    return bool(value) or (value == 0 and value is not False)


def _word(value: Any) -> str:
    """A field's value, quoted where it could be taken for more than one."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text.isascii() and text.isprintable() and _WORD.fullmatch(text) else json.dumps(text)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    log.critical("%s that nobody caught", kind.__name__, exc_info=(kind, error or kind(), traceback))
