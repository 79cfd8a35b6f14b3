"""Tests of how jobs are encoded."""

from __future__ import annotations

from math import ceil

import msgspec
import pytest

from servekit.requests.generation import GrammarKind
from servekit.sandbox.jobs import MESSAGES_PER_PIECE, PIECE_CHARACTERS, CompileGrammar, Job, RenderChat, encode_job


def test_a_job_that_is_encoded_in_pieces_equals_one_that_is_encoded_at_once() -> None:
    for num_messages in (0, 1, MESSAGES_PER_PIECE, MESSAGES_PER_PIECE + 1, 1000):
        messages = [{"role": "user", "content": f"{number}é", "n": [number]} for number in range(num_messages)]
        job = RenderChat("template", True, False, {"a": None}, messages)
        pieces = list(encode_job(job))
        assert msgspec.msgpack.decode(b"".join(pieces), type=Job) == job
        assert len(pieces) == max(1, ceil(num_messages / MESSAGES_PER_PIECE)), "the first has the job's head, too"


@pytest.mark.parametrize("num_characters", [PIECE_CHARACTERS, PIECE_CHARACTERS + 1, 5 * PIECE_CHARACTERS])
def test_long_texts_are_encoded_in_short_pieces(num_characters: int) -> None:
    text = "aé漢😀" * (num_characters // 4) + "漢" * (num_characters % 4)
    messages = [
        {"role": "user", "content": "short"},
        {"role": "user", "content": text, "tool_calls": [{"id": text[:100]}]},
        {"content": text, "role": text},
        {"role": "assistant", "content": "short"},
    ]
    job = RenderChat("template", True, False, {}, messages)
    pieces = list(encode_job(job))
    decoded = msgspec.msgpack.decode(b"".join(pieces), type=Job)
    assert decoded == job
    assert [list(message) for message in decoded.messages] == [list(message) for message in messages], "in this order"
    # A long text is not in the piece with other messages, which may have one text that is just not long.
    assert max(map(len, pieces)) <= 2 * 4 * PIECE_CHARACTERS


def test_many_messages_of_middle_length_are_encoded_in_short_pieces() -> None:
    messages = [{"role": "user", "content": "漢" * 5000}] * 200
    pieces = list(encode_job(RenderChat("template", True, False, {}, messages)))
    assert max(map(len, pieces)) <= 4 * PIECE_CHARACTERS


def test_a_text_that_is_not_unicode_is_refused() -> None:
    job = RenderChat("template", True, False, {}, [{"role": "user", "content": "a" * PIECE_CHARACTERS + "\ud800"}])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        list(encode_job(job))


def test_a_grammar_is_encoded_at_once() -> None:
    job = CompileGrammar(GrammarKind.REGEX, "a" * 10_000)
    (piece,) = encode_job(job)
    assert msgspec.msgpack.decode(piece, type=Job) == job
