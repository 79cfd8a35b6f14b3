"""Claims about docs/native.md that no server is needed for."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_operations import codes_in_the_source

PAGE = (Path(__file__).parents[2] / "docs" / "native.md").read_text()


def test_the_table_of_refusals_has_every_code_that_a_client_can_get() -> None:
    table = PAGE.partition("| status | code | when |")[2].partition("\n\n")[0]
    told = {code for row in table.splitlines()[2:] for code in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert told == codes_in_the_source() - {"invalid_config"}, "which ends the start"
