"""What all tests share: an environment for torch, and one server on the demo model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server_process import ServerProcess, serving

TESTS = Path(__file__).parent

# Before torch is imported anywhere: its threads must not spin for long, machines that run tests are busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


# `make test` gives each file to one of two processes, in this order and then that of the folders: what takes long must
# not come last, when the other process has nothing left to do.
LONG_FILES = (
    "sim/test_simulation.py",
    "e2e/test_process.py",
    "torture/test_workers.py",
    "e2e/test_console.py",
    "workers/test_token_identity.py",
    "e2e/test_recovery.py",
    "e2e/test_console_live.py",
    "e2e/test_terminal.py",
    "workers/test_triton_kernels.py",
    "workers/test_triton_compilation.py",
    "workers/test_gpu_path.py",
    "e2e/test_limits.py",
    "e2e/test_access.py",
    "e2e/test_simulated_model.py",
    "e2e/test_live.py",
    "e2e/test_terminal_pipe.py",
    "torture/test_schemas.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = str(item.path.relative_to(TESTS))
        return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)

    items.sort(key=place)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For every test that does not end it."""
    with serving(log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server
