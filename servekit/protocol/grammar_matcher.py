"""Make llguidance's tokenizer, and the matcher of a compiled grammar, for the sandbox and the mask process.

A sandbox process compiles each new grammar first and reports what is wrong with it. The worker's mask process then
compiles the same text with the same limits, and follows it token by token. The kinds of grammars that clients write are
in servekit/requests/generation.py; servekit/sandbox/compile_grammar.py translates them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# What one mask may cost. An ambiguous grammar can take seconds for one token, and unanchored patterns can take a lexer
# state for each text. With these limits a mask takes at most some ten milliseconds. Schemas of a hundred nested
# properties, of dates and of thousands of choices need a quarter of `step_max_items` and a tenth of `step_lexer_fuel`
# (docs/design/mask-process.md). 100,000 lexer states are 70 MB.
LIMITS = LLParserLimits(step_max_items=2000, step_lexer_fuel=100_000, max_lexer_states=100_000, verbose_errors=False)

PRIVATE = "\U0010fffd"  # from a private use area, so it is in no real text


def grammar_tokenizer(file: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Describe a model's tokens to llguidance, from its tokenizer.json. `vocab_size` is the number of logits.

    Special tokens get random names. With their own names, a grammar whose text contains one, such as a choice of
    "<eos>", would match the token instead of the text. Tokens beyond the logits are never sampled, and are left out.
    Raises ValueError for a tokenizer that llguidance cannot use.
    """
    tokenizer: dict[str, Any] = json.loads(file.read_bytes())
    added = [token for token in tokenizer.get("added_tokens", ()) if token["id"] < vocab_size]
    prefix = f"{PRIVATE}{secrets.token_hex(8)}:"
    # llguidance treats tags such as "<think>" as special tokens, also where the tokenizer does not, and then a grammar
    # cannot produce their text. So they are renamed like special tokens, and their text is made of ordinary tokens.
    hidden = [token for token in added if token["special"] or token["content"][:1] + token["content"][-1:] == "<>"]
    renamed: dict[str, str] = {token["content"]: f"{prefix}{token['id']}" for token in hidden}
    for token in hidden:
        token |= {"content": renamed[token["content"]], "special": True}

    def private(token: str) -> str:
        return renamed.get(token, token)

    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        known = {private(token): id_ for token, id_ in vocabulary.items() if id_ < vocab_size}
        tokenizer["model"]["vocab"] = known
        if (merges := tokenizer["model"].get("merges")) is not None:
            tokenizer["model"]["merges"] = [merge for merge in merges if _makes_a_token(merge, known)]
    else:  # a unigram model's pairs of token and score
        tokenizer["model"]["vocab"] = [(private(token), score) for token, score in vocabulary[:vocab_size]]
    tokenizer |= {"added_tokens": added, "post_processor": None, "truncation": None, "padding": None}
    try:
        return LLTokenizer(json.dumps(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # the Rust library raises plain exceptions
        raise ValueError(f"grammars are unavailable: llguidance cannot use this model's tokenizer ({error})") from None


def _makes_a_token(merge: str | list[str], vocabulary: Container[str]) -> bool:
    """Whether both parts of a merge and their result are in the vocabulary."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in vocabulary and right in vocabulary and left + right in vocabulary


def matcher_for(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of an answer. Never raises; `is_error` is set if the grammar is not valid."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
