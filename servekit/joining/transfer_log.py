"""Log lines about transfers of KV blocks, from several threads: each kind at most once in a second."""

from __future__ import annotations

import logging
import threading
import time
from math import inf

log = logging.getLogger("servekit.worker")

LOG_INTERVAL_S = 1.0


class TransferLog:
    """Limits the lines of one end of the transfers: other machines may cause them, and each failure of many fetches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_s: dict[str, float] = {}  # by kind

    def warning(self, message: str, kind: str = "") -> None:
        """Log a line, unless there was one of this kind a moment ago."""
        now_s = time.monotonic()
        with self._lock:
            is_due = now_s >= self._logged_s.get(kind, -inf) + LOG_INTERVAL_S
            if is_due:
                self._logged_s[kind] = now_s
        if is_due:
            log.warning("%s", message)
