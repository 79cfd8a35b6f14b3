"""Find the marks of the text before and after the part that a model fills in.

A model that was trained for it has special tokens for these marks; the tokenizer tells which.
"""

from __future__ import annotations

from msgspec import Struct

from servekit.parsing.lark import TokenId


class FillFormat(Struct, frozen=True):
    """The marks of one family of models, and in which order it expects the texts."""

    before: str  # the mark of the text before the answer
    after: str  # the mark of the text after it
    middle: str = ""  # the mark after which the answer begins
    is_after_first: bool = False  # whether the text after the answer comes first

    def prompt(self, before: str, after: str) -> str:
        """Return the prompt whose answer stands between the two texts."""
        if self.is_after_first:
            return f"{self.after}{after}{self.before}{before}{self.middle}"
        return f"{self.before}{before}{self.after}{after}{self.middle}"


FORMATS = (
    FillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    FillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FillFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FillFormat("<PRE>", "<SUF>", "<MID>"),
    FillFormat("[PREFIX]", "[SUFFIX]", is_after_first=True),  # Codestral
)

# Tokens that end the answer, besides the model's own end of sequence: another file, or the end of the middle.
ENDS = (
    "▁<EOT>",
    "<EOT>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<file_sep>",
    "<repo_name>",
    "<fim_pad>",
)


def choose_fill_format(token_id: TokenId) -> FillFormat | None:
    """Return the format whose marks are tokens of this vocabulary; None if the model cannot fill in text."""
    for each in FORMATS:
        if all(token_id(mark) is not None for mark in (each.before, each.after, each.middle) if mark):
            return each
    return None


def end_token_ids(token_id: TokenId) -> list[int]:
    """Return the tokens of this vocabulary that end an answer which is filled in."""
    return [found for text in ENDS if (found := token_id(text)) is not None]
