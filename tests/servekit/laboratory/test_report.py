"""Claims about how figures are written."""

from __future__ import annotations

import pytest

from servekit.laboratory.report import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 steps"), (1, "1 step"), (1000, "1,000 steps"), (1.0, "1 step"), (2.5, "2.5 steps")]
)
def test_a_number_of_things_has_their_plural_unless_it_is_one(number: float, text: str) -> None:
    assert counted(number, "step") == text
