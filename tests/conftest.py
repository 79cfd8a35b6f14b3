"""Set up what all tests share: an environment for torch, and one server with the demo model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, serving

TESTS = Path(__file__).parent

# Set before torch is imported: its threads must not spin for long, because machines that run tests are busy.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


# `make test` runs each file in one of three processes, these files first, then the others in the order of the folders.
# A long file at the end would leave the other processes without work.
LONG_FILES = (
    "e2e/test_process.py",
    "e2e/test_recovery.py",
    "e2e/test_console.py",
    "servekit/simulation/test_recording.py",
    "servekit/simulation/test_planted_bugs.py",
    "servekit/simulation/test_simulation.py",
    "servekit/sandbox/test_client.py",
    "workers/test_token_identity.py",
    "e2e/test_console_live.py",
    "e2e/test_terminal.py",
    "workers/test_triton_compilation.py",
    "workers/test_gpu_path.py",
    "workers/test_no_synchronisation.py",
    "e2e/test_observability.py",
    "e2e/test_profiling.py",
    "e2e/test_replicas.py",
    "e2e/test_joining_workers.py",
    "e2e/test_journal.py",
    "e2e/test_live.py",
    "e2e/test_limits.py",
    "e2e/test_chat_templates.py",
    "e2e/test_access.py",
    "e2e/test_simulated_model.py",
    "e2e/test_terminal_pipe.py",
    "workers/sampling/test_goodness_of_fit.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = str(item.path.relative_to(TESTS))
        return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)

    items.sort(key=place)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the demo model, for every test that does not end it."""
    folder = tmp_path_factory.mktemp("server")
    with serving("--batch-dir", str(folder / "batches"), log=folder / "log") as server:
        yield server
