"""Decode and check request bodies, and encode answers. Every error names the field, its value and the limit."""

from __future__ import annotations

import contextlib
import re
from array import array
from difflib import get_close_matches
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from servekit.errors import InvalidRequest

MAX_SHOWN_VALUE = 40  # characters of a wrong value that an error repeats
MAX_BODY_DECODED_TWICE = 2**16  # bytes; the second time to find the value that an error is about
MAX_JSON_DEPTH = 64  # nested objects and lists; a JSON schema has two levels for each of its objects
MAX_SHOWN_EXPECTATION = 200  # characters of what was expected, which may repeat a value, too

# msgspec's error messages. The path comes last and has no backticks; text from the client may come before it.
_MESSAGE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$\.?([^`]*)`)?", re.DOTALL)
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"

Body = TypeVar("Body", bound=Struct)


class _Peek(Struct):
    """The field that only TGI's bodies have."""

    inputs: Raw | UnsetType = UNSET


def is_tgi_body(body: bytes) -> bool:
    """Return whether a body has `inputs`, which TGI's clients send. False for what is not a JSON object."""
    try:
        return msgspec.json.decode(body, type=_Peek).inputs is not UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def decode(body: bytes, kind: type[Body], strict: bool = True) -> Body:
    """Decode and check a body. If not strict, numbers may be strings. Raises InvalidRequest that names the field."""
    try:
        body.decode()  # msgspec does not check the UTF-8 of values that it skips or leaves raw
        value = msgspec.json.decode(body, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:  # msgspec itself fails at some hundred levels
        raise _too_deep() from None
    if not is_shallow(body):
        raise _too_deep()
    return value


def _too_deep() -> InvalidRequest:
    return InvalidRequest(
        f"the request body is nested too deeply; the limit is {MAX_JSON_DEPTH} levels", code="invalid_json"
    )


_STEPS = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")  # one level in, one level out, as signed bytes
_NO_STEPS = bytes(set(range(256)) - set(b'[{]}"'))


def is_shallow(body: bytes) -> bool:
    """Return whether valid JSON is nested at most MAX_JSON_DEPTH deep. For most bodies counting brackets is enough."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return True
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_texts = unescaped.translate(_STEPS, _NO_STEPS).split(b'"')[::2]
    return max(accumulate(array("b", b"".join(outside_texts)))) <= MAX_JSON_DEPTH


def decode_query(query: dict[str, list[str]], kind: type[Body]) -> Body:
    """Decode a query string as a body: `?prompt=Hello&max_tokens=5&stop=a&stop=b`. Raises InvalidRequest."""
    properties = _properties(kind)
    values = {name: _parse_parameter(properties.get(name, {}), texts) for name, texts in query.items()}
    return decode(msgspec.json.encode(values), kind, strict=False)


@lru_cache
def _properties(kind: type[Struct]) -> dict[str, Any]:
    """Return the JSON schemas of a body's fields. Cached: they take milliseconds to generate."""
    properties: dict[str, Any] = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return properties


def _parse_parameter(schema: dict[str, Any], texts: list[str]) -> Any:
    """Parse a query parameter: a list repeats its name, and an object is written as JSON."""
    kinds = {kind.get("type", "object") for kind in schema.get("anyOf", [schema])}
    if "array" in kinds:
        return texts
    if "object" in kinds:
        # If it is not JSON, it stays text, and decoding the body reports that.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(texts[0])
    return texts[0] if len(texts) == 1 else texts


def _invalid(message: str, body: bytes, kind: type[Struct]) -> InvalidRequest:
    """Rewrite msgspec's `Expected ... - at $.field` with the value that the client sent."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    expected, param = match[1], match[2] or None
    if expected.startswith(_UNKNOWN):
        return _unknown(expected.removeprefix(_UNKNOWN).removesuffix("`"), param, kind)
    if expected.startswith(_MISSING):
        name = expected.removeprefix(_MISSING).removesuffix("`")
        param = f"{param}.{name}" if param else name
        return InvalidRequest(f"{param} is missing; it is required", param=param)
    expected = expected[0].lower() + expected[1:].replace(" | null", "").replace("`", "")
    return InvalidRequest(
        f"{param or 'the request body'}{_value_of(param, body)}: {_shortened(expected, MAX_SHOWN_EXPECTATION)}",
        param=param,
    )


def _unknown(field: str, param: str | None, kind: type[Struct]) -> InvalidRequest:
    field, known = _shortened(field, MAX_SHOWN_VALUE), _fields_at(kind, param)
    close = get_close_matches(field, known, n=1)
    suggestion = f"did you mean {close[0]!r}? The" if close else "the"
    where = f" in {param}" if param else ""
    return InvalidRequest(
        f"unknown field {field!r}{where}; {suggestion} fields are {', '.join(known)}",
        param=f"{param}.{field}" if param else field,
        code="unknown_field",
    )


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


def _fields_at(kind: type[Struct], param: str | None) -> list[str]:
    """Return the fields of a body, or of the object in one of its fields."""
    for name in (param or "").split("."):
        inner = (_struct_in(field.type) for field in msgspec.structs.fields(kind) if field.name == name)
        kind = next(inner, None) or kind
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _struct_in(kind: Any) -> type[Struct] | None:
    """Return the Struct in an annotation: GrammarField for `Annotated[GrammarField | None, ...]`."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    return next(filter(None, map(_struct_in, get_args(kind))), None)


def _value_of(param: str | None, body: bytes) -> str:
    """Return the value that the client sent for a field, if it is short enough to repeat."""
    if len(body) > MAX_BODY_DECODED_TWICE:
        return ""
    try:
        value = msgspec.json.decode(body)
        for name in (param or "").split("."):
            value = value[name]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""
    shown = repr(value)
    return f" = {shown}" if len(shown) <= MAX_SHOWN_VALUE else ""


def encode(response: Any) -> bytes:
    """Encode an answer as JSON."""
    return _encoder.encode(response)


_encoder = msgspec.json.Encoder()
