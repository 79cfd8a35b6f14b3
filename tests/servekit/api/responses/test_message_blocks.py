"""Blocks begin, grow and end one after the other, however the answer arrives in pieces."""

from __future__ import annotations

import pytest

from servekit.api.responses.message_blocks import Block, BlockBegins, BlockEnds, BlockGrows, BlockKind, BlockReader
from servekit.parsing.chat_format import Function, ToolUse, choose_chat_format
from servekit.scheduler.sequence import FinishReason
from tests.servekit.api.responses.test_chat_message import CALLS, deltas_of

USE = ToolUse((Function("add"), Function("look")))


@pytest.mark.parametrize("seed", range(10))
def test_one_block_is_open_at_a_time(seed: int) -> None:
    chat_format = choose_chat_format("", "qwen3", "hermes", {}.get, ())
    reader = BlockReader(chat_format.for_answers("", USE, None, None))
    deltas = deltas_of(f"<think>Hm.</think>First.{CALLS}Last.", FinishReason.STOP, seed)
    is_open: Block | None = None
    grown: dict[int, str] = {}
    for delta in deltas:
        for event in reader.read([delta]):
            match event:
                case BlockBegins(block):
                    assert is_open is None and block.index == len(grown)
                    is_open, grown[block.index] = block, ""
                case BlockGrows(block, text):
                    assert block is is_open and text
                    grown[block.index] += text
                case BlockEnds(block):
                    assert block is is_open
                    is_open = None
    assert is_open is None and [*grown.values()] == [block.text for block in reader.blocks]
    call = BlockKind.CALL
    kinds = [BlockKind.REASONING, BlockKind.TEXT, call, call, BlockKind.TEXT]
    assert [block.kind for block in reader.blocks] == kinds and reader.has_calls
    assert [block.name for block in reader.blocks] == ["", "", "add", "look", ""]
    assert reader.num_tokens == len(deltas) and reader.num_reasoning_tokens < len(deltas)
