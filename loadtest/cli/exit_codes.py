"""Exit codes of `python -m loadtest`, for CI."""

from __future__ import annotations

SUCCESS = 0
OBJECTIVE_MISSED = 1  # or with --verify, an answer was wrong or garbled
USAGE_ERROR = 2  # what was asked for cannot be done
NOT_VALID = 3  # the client was the bottleneck, or failed, so the figures cannot be trusted
INTERRUPTED = 130  # 128 plus the number of SIGINT, as shells report it
