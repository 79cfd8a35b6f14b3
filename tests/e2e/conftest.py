"""One server on the demo model, shared by every test that does not end it."""

from collections.abc import Iterator

import pytest

from tests.server_process import ServerProcess, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server
