"""Find the JSON types that a function's parameters may have, and convert text to JSON of such a type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

Types = frozenset[str]  # names of JSON types, as schemas have them
ANY: Types = frozenset()  # the schema does not tell
MAX_SCHEMAS = 256  # that are looked at for one parameter: `$ref` and `anyOf` can name each other without end
# Chat templates write earlier calls with these words of Python, so that models do so, too.
_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class ParameterTypes:
    """The types of one function's parameters."""

    def __init__(self, schema: str) -> None:
        """`schema` is the JSON schema of all parameters; "" for a function that the request does not have."""
        try:
            self._schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            self._schema = None

    def of(self, name: str) -> Types:
        """Return the types that a parameter may have."""
        properties = _member(_resolved(self._schema, self._schema), "properties")
        found: set[str] = set()
        pending = [_member(properties, name)]
        for _ in range(MAX_SCHEMAS):
            if not pending:
                return frozenset(found)
            schema = _resolved(pending.pop(), self._schema)
            alternatives = _member(schema, "anyOf") or _member(schema, "oneOf") or _member(schema, "allOf")
            if types := set(_own_types(schema)):
                found |= types
            elif isinstance(alternatives, list) and alternatives:
                pending += alternatives
            else:
                return ANY
        return ANY


def as_json(text: str, types: Types) -> str:
    """Return a value that a model wrote as plain text, as JSON: of one of these types, if it has one of them."""
    written = text.strip()
    written = _WORDS.get(written, written)
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and _type_of(value) not in types and not (_type_of(value) == "integer" and "number" in types):
        return json.dumps(text, ensure_ascii=False)
    return written


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _own_types(schema: Any) -> Iterator[str]:
    """Yield the types that a schema itself tells."""
    types = _member(schema, "type")
    if isinstance(types, str):
        yield types
    elif isinstance(types, list):
        yield from (each for each in types if isinstance(each, str))
    elif isinstance(values := _member(schema, "enum"), list):
        yield from map(_type_of, values)
    elif isinstance(schema, dict) and "const" in schema:
        yield _type_of(schema["const"])


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _resolved(schema: Any, root: Any) -> Any:
    """Return the schema that a reference inside the same document names; any other schema as it is."""
    reference = _member(schema, "$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = root
    for name in reference[2:].split("/"):
        found = _member(found, name.replace("~1", "/").replace("~0", "~"))
    return found
