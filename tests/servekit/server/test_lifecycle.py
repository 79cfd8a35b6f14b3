"""The warnings at the start of a server."""

from itertools import pairwise

import pytest

from servekit.server.lifecycle import doubts_about_blocks


def test_usual_contexts_have_few_enough_blocks() -> None:
    assert doubts_about_blocks(max_total_tokens=131_072, block_size=16) == []


@pytest.mark.parametrize("max_total_tokens", [262_145, 1_000_000, 10_000_000])
def test_following_the_warning_about_long_block_tables_silences_it(max_total_tokens: int) -> None:
    (warning,) = doubts_about_blocks(max_total_tokens, block_size=16)
    assert f"{-(-max_total_tokens // 16):,} KV blocks" in warning
    words = warning.split()
    (named,) = [int(after) for before, after in pairwise(words) if before == "--block-size"]
    assert doubts_about_blocks(max_total_tokens, named) == []
    assert doubts_about_blocks(max_total_tokens, named // 2), "a smaller size would have been enough"
