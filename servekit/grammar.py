"""Turn what a client wrote into a grammar of llguidance's, and see that it compiles. Runs in a sandbox process only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from servekit.generation_request import GrammarKind
from servekit.sandbox_jobs import CompileGrammar, Done, Outcome, Refused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# As models are trained to write JSON. With free whitespace a model may go on with blanks until its tokens run out.
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def compile_grammar(job: CompileGrammar, tokenizer: LLTokenizer) -> Outcome:
    try:
        grammar = _translate(job.kind, job.text)
    except ValueError as error:
        return Refused(str(error))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # much of a grammar is only looked at when it is first used
    return Refused(matcher.get_error()) if matcher.is_error() else Done(grammar)


def _translate(kind: GrammarKind, text: str) -> str:
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_STYLE)
        case GrammarKind.JSON:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_STYLE)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(text)
        case GrammarKind.CHOICE:
            # A JSON string literal is one of Lark's.
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
