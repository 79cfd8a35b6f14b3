"""Fixtures that read the log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from servekit.protocol.logging import JsonFormatter, TextFormatter
from tests.support.asgi import Log, logging_to


@pytest.fixture
def log() -> Iterator[Log]:
    yield from logging_to(JsonFormatter())


@pytest.fixture
def text_log() -> Iterator[Log]:
    yield from logging_to(TextFormatter())
