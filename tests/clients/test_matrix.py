"""The tables of docs/clients.md: each row does what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.clients.matrix import CALLS, MISSING, PAGE, Call, Clients, Missing, page_with_tables
from tests.support.server_process import serving


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    folder = tmp_path_factory.mktemp("matrix")
    with serving("--batch-dir", str(folder), log=folder / "log") as server, ExitStack() as stack:
        yield Clients(server.url, stack)


@pytest.mark.long
@pytest.mark.parametrize("row", [*CALLS, *MISSING], ids=lambda row: f"{row[0]} {row[1]}")
def test_a_row_of_the_page_is_true(clients: Clients, row: Call | Missing) -> None:
    row.check(clients)


def test_the_page_has_every_row() -> None:
    text = PAGE.read_text()
    assert page_with_tables(text) == text, "run `python -m tests.clients.matrix --write`"
    assert len(CALLS) >= 60 and len({row[:2] for row in CALLS}) == len(CALLS)
