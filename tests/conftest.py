"""What all tests share: an environment for torch, and one server on the demo model."""

import os
from collections.abc import Iterator

import pytest

from tests.server_process import ServerProcess, serving

# Before torch is imported anywhere: its threads must not spin for long, machines that run tests are busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For every test that does not end it."""
    with serving(log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server
