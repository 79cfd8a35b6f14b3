"""Set up what all tests share: an environment for torch, and one server with the demo model."""

import os
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from operator import not_
from pathlib import Path

import pytest
from hypothesis import settings

from servekit.protocol.light_imports import light_imports
from tests import pure_core
from tests.support.server_process import ServerProcess, serving
from tests.support.time_limit import limited

TESTS = Path(__file__).parent

# Set before torch is imported: its threads must not spin for long, because machines that run tests are busy.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Hypothesis would fail an example that takes longer than 0.2 s, also if another program delays it.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


# `make test` and `make test-long` run each file in one of three processes, these files first, then the others in the
# order of the folders. A long file at the end would leave the other processes without work.
LONG_FILES = (
    # Those with many long tests: two to eight minutes.
    "servekit/simulation/test_simulation.py",
    "e2e/test_ranks.py",
    "torture/test_attacks.py",
    "servekit/simulation/test_replicas.py",
    "workers/parallel/test_ranks.py",
    "e2e/test_speculation.py",
    "e2e/test_wheel.py",
    "servekit/simulation/test_shared_turns.py",
    "workers/layers/test_quantized_gemm.py",
    "torture/test_workers.py",
    "workers/test_triton_compilation.py",
    # Those with many other tests, the longest first: 45 s to 5 s.
    "workers/loading/test_quantized_weights.py",
    "e2e/test_process.py",
    "e2e/test_live.py",
    "e2e/test_limits.py",
    "e2e/test_console.py",
    "servekit/sandbox/test_client.py",
    "e2e/test_disaggregated_workers.py",
    "e2e/test_chat_templates.py",
    "e2e/test_recovery.py",
    "e2e/test_several_models.py",
    "e2e/test_replicas.py",
    "workers/attention/test_gpu_backends.py",
    "e2e/test_console_live.py",
    "e2e/test_lora.py",
    "workers/test_token_identity.py",
    "e2e/test_simulated_model.py",
    "docs/test_docs.py",
    "e2e/test_model_kinds.py",
    "e2e/test_journal.py",
    "workers/sampling/test_triton_sampler.py",
    "workers/attention/test_triton_kernels.py",
    "servekit/laboratory/test_command.py",
    "e2e/test_disaggregated_prefill.py",
    "servekit/joining/test_agent.py",
    "servekit/simulation/test_planted_bugs.py",
    "e2e/test_joining_workers.py",
    "workers/parallel/test_rendezvous.py",
    "e2e/test_access.py",
    "workers/sampling/test_logprobs.py",
    "e2e/test_terminal.py",
    "workers/sampling/test_sampler.py",
    "workers/test_no_synchronisation.py",
    "workers/test_gpu_path.py",
    "servekit/simulation/test_recording.py",
    "workers/sampling/test_goodness_of_fit.py",
    "e2e/test_profiling.py",
    "e2e/test_observability.py",
    "e2e/test_terminal_pipe.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests, and torch and transformers with them, as a worker does. Some tests are ranks of one model."""
    with light_imports(shares_model=True):
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pure-core",
        choices=["only", "without"],
        help="only: what `make coverage` runs; without: all but that, so that CI runs each test once",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which no test is chosen: each test process imports all that it collects."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    is_pure, text = pure_core.is_test_file(collection_path), collection_path.read_text()
    has_none = config.option.markexpr == "long" and "mark.long" not in text
    if config.option.pure_core == "only":
        has_none |= not is_pure
    elif config.option.pure_core == "without":
        has_none |= is_pure and not any(f"mark.{mark}" in text for mark in pure_core.NOT_IN_COVERAGE)
    return has_none or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = str(item.path.relative_to(TESTS))
        return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)

    if config.option.pure_core is not None:
        is_chosen = [pure_core.is_in_coverage(item) == (config.option.pure_core == "only") for item in items]
        config.hook.pytest_deselected(items=list(compress(items, map(not_, is_chosen))))
        items[:] = compress(items, is_chosen)
    items.sort(key=place)


def time_limit_of(item: pytest.Item, phase: str) -> AbstractContextManager[None]:
    """Long tests have limits of their own."""
    return nullcontext() if item.get_closest_marker("long") else limited(f"{phase} of {item.nodeid}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with time_limit_of(item, "the setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with time_limit_of(item, "the call"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with time_limit_of(item, "the teardown"):
        return (yield)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the demo model, for every test that does not end it."""
    folder = tmp_path_factory.mktemp("server")
    with serving("--batch-dir", str(folder / "batches"), log=folder / "log") as server:
        yield server
