"""Divide a text into the windows that a model reads, and compute its perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Annotated

from msgspec import Meta, Struct

from servekit.errors import ConfigError
from servekit.evaluation.json_lines import decode_lines
from servekit.evaluation.statistics import Interval, mean_interval


class Window(Struct, frozen=True):
    """A part of the text that is one prompt: tokens [begin, end), of which those from `scored_from` on count."""

    begin: int
    scored_from: int
    end: int


def windows(num_tokens: int, length: int, stride: int) -> list[Window]:
    """Return windows of up to `length` tokens that count each token once, with `length` - `stride` tokens before it.

    The first window counts all its tokens. This is the perplexity with a sliding window of Hugging Face's page
    "Perplexity of fixed-length models"; with `stride` = `length`, the windows do not overlap.
    """
    assert 0 < stride <= length
    found, scored = [], 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + length, num_tokens)
        found.append(Window(begin, scored, end))
        scored = end
        if end == num_tokens:
            break
    return found


class Document(Struct, forbid_unknown_fields=True):
    """One line of a text file in JSON lines: nothing that stands before it counts as its context."""

    text: Annotated[str, Meta(min_length=1)]


def parse_documents(content: bytes, name: str) -> list[str]:
    """Return the documents of a text file: those of its lines if it is named `.jsonl`, else all of it as one.

    Raises ConfigError.
    """
    if name.endswith(".jsonl"):
        return [document.text for _, document in decode_lines(content, Document, name)]
    try:
        return [content.decode()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8: byte {error.start}: {error.reason}") from None


class TokenScore(Struct, frozen=True):
    """The logprob that a model gives to a token of a text."""

    logprob: float
    likeliest: str | None  # the text of the token that it would have chosen, if the server returns it


class TextScore(Struct):
    """The scores of the tokens of a text's documents.

    A document's first token has no score if nothing stands before it, not even a BOS token.
    """

    token_ids: list[int]
    scores: list[TokenScore]
    num_bytes: int  # of the text

    @property
    def losses(self) -> list[float]:
        """Negative logprobs, in nats."""
        return [-score.logprob for score in self.scores]

    @property
    def perplexity(self) -> Interval:
        return exponential(mean_interval(self.losses))

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits by bytes of text, which does not depend on the tokenizer."""
        return sum(self.losses) / log(2) / self.num_bytes


def perplexity_ratio(first: TextScore, second: TextScore) -> Interval:
    """Return the first perplexity divided by the second, of the same tokens: exp of the mean difference of losses."""
    assert first.token_ids == second.token_ids
    pairs = zip(first.losses, second.losses, strict=True)
    return exponential(mean_interval([ours - theirs for ours, theirs in pairs]))


def same_likeliest(first: Sequence[TokenScore], second: Sequence[TokenScore]) -> float | None:
    """Return the share of tokens at which both models have the same likeliest token; None if that is not known."""
    pairs = [(ours.likeliest, theirs.likeliest) for ours, theirs in zip(first, second, strict=True)]
    known = [ours == theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    return sum(known) / len(known) if known else None


def exponential(interval: Interval) -> Interval:
    """Return the interval of a mean loss as one of a perplexity. Losses count up to 700; a float holds exp of that."""
    return Interval(*(exp(min(value, 700.0)) for value in (interval.estimate, interval.low, interval.high)))
