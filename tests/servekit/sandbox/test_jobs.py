"""Tests of how jobs are encoded."""

from __future__ import annotations

from math import ceil

import msgspec

from servekit.request import GrammarKind
from servekit.sandbox.jobs import MESSAGES_PER_PIECE, CompileGrammar, Job, RenderChat, encode_job


def test_a_job_that_is_encoded_in_pieces_equals_one_that_is_encoded_at_once() -> None:
    for num_messages in (0, 1, MESSAGES_PER_PIECE, MESSAGES_PER_PIECE + 1, 1000):
        messages = [{"role": "user", "content": f"{number}é", "n": [number]} for number in range(num_messages)]
        job = RenderChat("template", True, False, {"a": None}, messages)
        pieces = list(encode_job(job))
        assert msgspec.msgpack.decode(b"".join(pieces), type=Job) == job
        num_pieces = ceil(num_messages / MESSAGES_PER_PIECE)
        assert len(pieces) == (1 if num_pieces <= 1 else 1 + num_pieces), "the head, and the messages"


def test_a_grammar_is_encoded_at_once() -> None:
    job = CompileGrammar(GrammarKind.REGEX, "a" * 10_000)
    (piece,) = encode_job(job)
    assert msgspec.msgpack.decode(piece, type=Job) == job
