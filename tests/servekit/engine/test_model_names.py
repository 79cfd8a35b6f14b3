"""What an error says of the names that there are."""

from __future__ import annotations

import itertools

from servekit.engine.model_names import MAX_NAMES_SHOWN, listed, model_not_found


def test_a_refusal_lists_the_first_names_and_reads_no_others() -> None:
    names = (f"adapter-{i}" for i in itertools.count())
    message = model_not_found("x", names).message
    assert message.count("adapter-") == MAX_NAMES_SHOWN and message.endswith("'adapter-19' and others.")
    assert next(names) == f"adapter-{MAX_NAMES_SHOWN + 1}"


def test_a_few_names_are_listed_whole() -> None:
    assert listed(["a", "b"]) == "'a', 'b'"
    assert "no model that this API key may use" in model_not_found("x", []).message
