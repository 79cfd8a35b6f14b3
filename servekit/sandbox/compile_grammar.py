"""Translate and check grammars for answers with llguidance, within limits of time. Runs only in a sandbox process.

To add a kind of grammar, add it to `GrammarKind` in servekit/requests/generation.py, translate it in `_translate` here,
and let the schemas in servekit/api/schemas/ accept it.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from servekit.protocol.grammar_matcher import matcher_for
from servekit.requests.generation import Grammar, GrammarKind
from servekit.sandbox.jobs import CompileGrammar, Done, Outcome, Refused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# The style in which models are trained to write JSON. With flexible whitespace a model may write blanks until its
# tokens run out. `lenient` would ignore keywords that cannot be enforced.
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
# The mask process compiles the grammar again. During this it computes no mask, so all answers with a grammar wait.
MAX_COMPILE_S = 0.05


def compile_grammar(job: CompileGrammar, tokenizer: LLTokenizer) -> Outcome:
    """Return the text for the worker to compile, or what is wrong with the grammar. This may crash the process."""
    try:
        grammar = _translate(job.kind, job.text, job.parts)
    except ValueError as error:
        return Refused(str(error))
    started_s = time.process_time()
    matcher = matcher_for(grammar, tokenizer)
    # Much of a grammar is compiled only when it is used, and a grammar without an end is detected at the second token.
    for _ in range(2):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the first allowed token
    if matcher.is_error():
        return Refused(_faulty_part(job.parts, tokenizer) or _readable(matcher.get_error()))
    elapsed_s = time.process_time() - started_s
    if elapsed_s > MAX_COMPILE_S:
        return Refused(
            f"it takes {1e3 * elapsed_s:.0f} ms to compile, and other answers with a grammar would wait; the limit is "
            f"{1e3 * MAX_COMPILE_S:.0f} ms: make it simpler"
        )
    return Done(grammar)


def _faulty_part(parts: tuple[Grammar, ...], tokenizer: LLTokenizer) -> str:
    """Return which part cannot be compiled, and why; empty if all can be. llguidance does not name the part."""
    for part in parts:
        matcher = matcher_for(_translate(part.kind, part.text), tokenizer)
        if matcher.is_error():
            return _named(part, _readable(matcher.get_error()))
    return ""


def _translate(kind: GrammarKind, text: str, parts: tuple[Grammar, ...] = ()) -> str:
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(_schema(text), overrides=JSON_STYLE)
        case GrammarKind.JSON:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_STYLE)
        case GrammarKind.REGEX:
            # \d, \w and \s match ASCII only, as in JSON schemas; otherwise \d would match digits of all scripts.
            return LLMatcher.grammar_from_regex(regex_to_lark(text, "dws"))
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(text)
        case GrammarKind.CHOICE:
            # Use one terminal, because a rule of many alternatives takes seconds. A JSON string in ASCII is a Lark
            # literal.
            literals = map(json.dumps, json.loads(text))
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(literals))
        case GrammarKind.COMPOSED:
            return _compose(text, parts)


def _compose(text: str, parts: tuple[Grammar, ...]) -> str:
    """Return one grammar made of several. Errors in a part name this part."""
    grammars: list[dict[str, Any]] = [{"name": "start", "lark_grammar": text}]
    for number, part in enumerate(parts):
        try:
            translated = _translate(part.kind, part.text)
        except ValueError as error:
            raise ValueError(_named(part, str(error))) from None
        # llguidance writes some kinds as JSON, and leaves Lark as it is.
        grammar = json.loads(translated)["grammars"][0] if translated.startswith("{") else {"lark_grammar": translated}
        grammars.append(grammar | {"name": f"part{number}"})
    return json.dumps({"grammars": grammars})


def _named(part: Grammar, error: str) -> str:
    return f"{part.param}: {error}" if part.param else error


def _schema(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object or true")
    schema.pop("x-guidance", None)  # a schema must not change how strictly it is enforced
    if ("properties" in schema or "required" in schema) and not schema.keys() & {"type", "$ref", "anyOf", "oneOf"}:
        schema["type"] = "object"  # by the standard, the schema also allows a number, which its author did not intend
    return schema


def _readable(error: str) -> str:
    """llguidance's error in one line: the place and the cause."""
    if error.startswith("NoExtension"):
        return "no answer can ever match it"
    lines = error.strip().split("\n")
    cause = next((line for line in lines if line.startswith("error: ")), "")
    # Hide the private names of special tokens.
    message = re.sub("⟦.*?⟧", "…", f"{lines[0]} {cause}".strip())
    return message[:300] or "it cannot be compiled"
