"""Grammars for answers, over llguidance: how they are written, how they are compiled, and within which limits.

A sandbox process compiles each new grammar first and says what is wrong with it; the worker then compiles the same
text, with the same limits, and follows it token by token.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from servekit.generation_request import GrammarKind
from servekit.sandbox_jobs import CompileGrammar, Done, Outcome, Refused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# As models are trained to write JSON. With free whitespace a model may go on with blanks until its tokens run out.
# `lenient` would ignore the keywords that cannot be enforced.
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
# The worker compiles between two steps, and every stream waits. What took no longer takes no more than some megabytes
# either, for most of that time goes into writing them.
MAX_COMPILE_S = 0.05
# An ambiguous grammar can take seconds for one token, and the whole batch waits. With this it is given up within some
# ten milliseconds; a schema of a hundred nested properties does with 200.
LIMITS = LLParserLimits(step_max_items=5000, verbose_errors=False)

PRIVATE = "\U0010fffd"  # a character of nobody's alphabet


def grammar_tokenizer(file: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """What llguidance must know of a model's tokens, from its tokenizer.json. `vocab_size` is that of the logits.

    Special tokens get names that nobody can guess. Under their own, a grammar whose text happens to spell one, such as
    a choice of "<eos>", would ask for the token and not for the text. Tokens beyond the logits are never sampled, and
    left out. Raises ValueError for a tokenizer that llguidance cannot use.
    """
    tokenizer: dict[str, Any] = json.loads(file.read_bytes())
    added = [token for token in tokenizer.get("added_tokens", ()) if token["id"] < vocab_size]
    prefix = f"{PRIVATE}{secrets.token_hex(8)}:"
    # Tags such as "<think>" are no special tokens for their makers, but llguidance takes them for such: by their text
    # they could not be written, so they are named like the others, and written with ordinary tokens.
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
    except Exception as error:  # whatever the Rust library raises
        raise ValueError(f"no grammars for this model: llguidance cannot use its tokenizer ({error})") from None


def _makes_a_token(merge: str | list[str], vocabulary: Container[str]) -> bool:
    """Whether both parts of a merge and what they make are still there."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in vocabulary and right in vocabulary and left + right in vocabulary


def matcher_for(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """At the beginning of an answer. It never raises: `is_error` says whether it can be used."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def compile_grammar(job: CompileGrammar, tokenizer: LLTokenizer) -> Outcome:
    """What the worker is to compile, or what is wrong with it. To be called where a crash hurts nobody."""
    try:
        grammar = _translate(job.kind, job.text)
    except ValueError as error:
        return Refused(str(error))
    started_s = time.process_time()
    matcher = matcher_for(grammar, tokenizer)
    # Much of a grammar is looked at only when it is used, and one that never ends is noticed with the second token.
    for _ in range(2):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the first of them
    if matcher.is_error():
        return Refused(_in_words(matcher.get_error()))
    elapsed_s = time.process_time() - started_s
    if elapsed_s > MAX_COMPILE_S:
        return Refused(
            f"it takes {1e3 * elapsed_s:.0f} ms to compile, and every stream would wait for it; at most "
            f"{1e3 * MAX_COMPILE_S:.0f} are taken: make it simpler"
        )
    return Done(grammar)


def _translate(kind: GrammarKind, text: str) -> str:
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(_schema(text), overrides=JSON_STYLE)
        case GrammarKind.JSON:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_STYLE)
        case GrammarKind.REGEX:
            # \d, \w and \s mean ASCII, as in JSON schemas, and no digit that a reader of the answer does not know.
            return LLMatcher.grammar_from_regex(regex_to_lark(text, "dws"))
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(text)
        case GrammarKind.CHOICE:
            # One terminal, for a rule of many alternatives takes seconds. A JSON literal in ASCII is one of Lark's.
            literals = map(json.dumps, json.loads(text))
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(literals))


def _schema(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    schema.pop("x-guidance", None)  # how strictly it is followed is not the schema's to say
    if ("properties" in schema or "required" in schema) and not schema.keys() & {"type", "$ref", "anyOf", "oneOf"}:
        schema["type"] = "object"  # by the letter it allows a number, too; that is not what its writer meant
    return schema


def _in_words(error: str) -> str:
    """llguidance's error in one line: where, and what for."""
    if error.startswith("NoExtension"):
        return "no answer can ever match it"
    lines = error.strip().split("\n")
    cause = next((line for line in lines if line.startswith("error: ")), "")
    # A list of the special tokens, by their private names, helps nobody.
    told = re.sub("⟦.*?⟧", "…", f"{lines[0]} {cause}".strip())
    return told[:300] or "it cannot be compiled"
