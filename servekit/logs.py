"""How log lines look, in the server and in its workers."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """Send readable lines to standard error: time, level, which part, what."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s  %(message)s", datefmt="%H:%M:%S"
    )
    # At debug level it prints every chunk of every stream, and with it what users ask and are told.
    logging.getLogger("sse_starlette").setLevel(max(logging.INFO, logging.getLogger().level))
