"""The numbers that stand for the tokens of a remote model."""

from __future__ import annotations

import pytest

from servekit.errors import InvalidRequest, RemoteFailed
from servekit.remote import token_texts
from servekit.remote.token_texts import UNKNOWN_TOKEN_ID, TokenTexts


def test_texts_have_numbers_that_are_no_ids_of_a_model() -> None:
    texts = TokenTexts("gpt")
    first, second = texts.id_of(b"a"), texts.id_of("é".encode()[:1])
    assert len({UNKNOWN_TOKEN_ID, first, second}) == 3 and max(first, second) < 0
    assert texts.id_of(b"a") == first
    assert texts.decode([first, UNKNOWN_TOKEN_ID, second]) == "a\ufffd"
    with pytest.raises(InvalidRequest, match="its tokenizer is not known here"):
        texts.decode([5])
    with pytest.raises(RemoteFailed, match="a token of 5000 bytes"):
        texts.id_of(b"a" * 5000)


@pytest.mark.parametrize(("setting", "limit"), [("MAX_TOKENS", 3), ("MAX_BYTES", 6)])
def test_a_server_may_name_any_number_of_tokens_and_those_not_named_for_long_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, setting: str, limit: int
) -> None:
    """A limit for the life of the process would fail all later requests for logprobs, and open the circuit breaker."""
    monkeypatch.setattr(token_texts, setting, limit)
    texts = TokenTexts("gpt")
    common = texts.id_of(b"of")
    numbers = []
    for number in range(50):
        numbers.append(texts.id_of(b"%02d" % number))
        assert texts.id_of(b"of") == common, "it is named again and again"
    assert len({common, *numbers}) == 51
    assert texts.decode([numbers[-2], common, numbers[-1]]) == "48of49"
    assert len(texts._texts) == 4 and texts._num_bytes == 6
    with pytest.raises(InvalidRequest):
        texts.decode([numbers[0]])
