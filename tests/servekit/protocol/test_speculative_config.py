"""The value of --speculative."""

from __future__ import annotations

import pytest

from servekit.errors import ConfigError
from servekit.protocol.speculative_config import (
    DEFAULT_MAX_DRAFTS,
    MAX_DRAFTS,
    SpeculativeConfig,
    parse_speculative,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", SpeculativeConfig()),
        ("auto", SpeculativeConfig("auto", "", 7)),
        ("ngram", SpeculativeConfig("ngram", "", 7)),
        ("ngram:5", SpeculativeConfig("ngram", "", 5)),
        ("draft", SpeculativeConfig("draft", "", 7)),
        ("draft:3", SpeculativeConfig("draft", "", 3)),
        ("draft:models/small", SpeculativeConfig("draft", "models/small", 7)),
        ("draft:C:/small:2", SpeculativeConfig("draft", "C:/small", 2)),
        ("draft:./7", SpeculativeConfig("draft", "./7", 7)),
        ("self", SpeculativeConfig("self", "", 4, "w4a8")),
        ("self:int8:6", SpeculativeConfig("self", "", 6, "int8")),
        ("self:2", SpeculativeConfig("self", "", 2, "w4a8")),
        ("medusa", SpeculativeConfig("medusa", "", 4)),
        ("medusa:heads", SpeculativeConfig("medusa", "heads", 4)),
        ("eagle:yuhuili/EAGLE3:5", SpeculativeConfig("eagle", "yuhuili/EAGLE3", 5)),
        ("mtp:1", SpeculativeConfig("mtp", "", 1)),
        ("ngram+draft", SpeculativeConfig("draft", "", 7, lookup_first=True)),
        ("ngram+draft:models/small:4", SpeculativeConfig("draft", "models/small", 4, lookup_first=True)),
        ("ngram+self:int8", SpeculativeConfig("self", "", 7, "int8", lookup_first=True)),
        ("ngram+medusa:heads", SpeculativeConfig("medusa", "heads", 7, lookup_first=True)),
    ],
)
def test_every_form_is_read(text: str, expected: SpeculativeConfig) -> None:
    assert parse_speculative(text) == expected
    assert expected.is_on == (text != "off")
    assert text.startswith(expected.name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no drafter"),
        ("on", "'on' is no drafter"),
        ("NGRAM", "is no drafter"),
        ("off:1", "off takes no more than its name"),
        ("auto:4", "auto takes no more than its name"),
        ("ngram:", "followed by nothing"),
        ("ngram:five", "'five' is not a number"),
        ("ngram:-1", "'-1' is not a number"),
        ("ngram:٣", "is not a number"),
        ("ngram:0", "K is 0, and must be from 1 to 16"),
        ("draft:small:17", "K is 17, and must be from 1 to 16"),
        ("self:int3", "'int3' is not one of the formats int8, int4"),
        ("mtp:path", "'path' is not a number"),
        ("eagle", "needs the path of its head"),
        ("eagle:4", "needs the path of its head"),
        ("ngram+", "'' is no drafter"),
        ("ngram+draft:99", "K is 99, and must be from 1 to 16; give less, leave K out for 7,"),
        ("ngram+eagle", "needs the path of its head"),
        ("ngram+ngram", "ngram is no drafter that prompt lookup can be put before"),
        ("ngram+ngram+draft", "'ngram+draft' is no drafter"),
        ("ngram+off", "off is no drafter that prompt lookup can be put before"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_value_and_a_remedy(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_speculative(text)
    assert why in raised.value.message
    assert repr(text) in raised.value.message
    assert "off" in raised.value.message


def test_every_default_is_within_the_limit() -> None:
    assert all(1 <= default <= MAX_DRAFTS for default in DEFAULT_MAX_DRAFTS.values())


def test_a_drafter_without_a_path_comes_with_the_model() -> None:
    assert parse_speculative("draft").directory("/models/large") == "/models/large/draft"
    assert parse_speculative("draft:/models/small").directory("/models/large") == "/models/small"
