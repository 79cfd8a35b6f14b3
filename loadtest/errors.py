"""The error that users of the load generator see."""

from __future__ import annotations


class LoadTestError(Exception):
    """The message names the value, the limit and what to do; the command ends with exit code 2."""
