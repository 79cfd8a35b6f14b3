"""What a user of the load generator can do wrong, and what can go wrong around it."""

from __future__ import annotations


class LoadTestError(Exception):
    """The message gives the value, the limit and the remedy; the command ends with exit code 2."""
