"""The prompts that models were trained to fill in, as their own documentation writes them."""

from __future__ import annotations

import pytest

from servekit.parsing.fill_in_the_middle import FORMATS, choose_fill_format, end_token_ids

# The tokens of a family, and its prompt for the text `a` before the answer and `b` after it.
FAMILIES = {
    "Qwen2.5-Coder": (
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    ),
    "StarCoder2": (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], "<fim_prefix>a<fim_suffix>b<fim_middle>"),
    "SantaCoder": (["<fim-prefix>", "<fim-middle>", "<fim-suffix>"], "<fim-prefix>a<fim-suffix>b<fim-middle>"),
    "DeepSeek-Coder": (
        ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
        "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
    ),
    "CodeLlama": (["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"], "▁<PRE>a▁<SUF>b▁<MID>"),
    "Codestral": (["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], "[SUFFIX]b[PREFIX]a"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_prompt_has_its_own_marks_and_order(family: str) -> None:
    tokens, expected = FAMILIES[family]
    chosen = choose_fill_format(dict(zip(tokens, range(10), strict=False)).get)
    assert chosen is not None and chosen.prompt("a", "b") == expected


def test_a_model_without_all_marks_of_a_family_cannot_fill_in_text() -> None:
    assert choose_fill_format({}.get) is None
    for each in FORMATS:
        marks = {mark for mark in (each.before, each.after, each.middle) if mark}
        for missing in marks:
            assert choose_fill_format(dict.fromkeys(marks - {missing}, 1).get) is None


def test_only_tokens_that_the_vocabulary_has_end_the_answer() -> None:
    assert end_token_ids({"▁<EOT>": 7, "<|fim_pad|>": 9, "<other>": 1}.get) == [7, 9]
    assert end_token_ids({}.get) == []
