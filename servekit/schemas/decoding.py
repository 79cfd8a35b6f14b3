"""From bytes to a checked body, and from an answer to bytes. Every refusal names the field, its value and the limit."""

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

MAX_VALUE_TOLD = 40  # characters of a wrong value that an error repeats
LARGEST_BODY_READ_TWICE = 2**16  # bytes
MAX_JSON_DEPTH = 64  # objects and lists within each other; a schema adds two for each of its objects
MAX_EXPECTED_TOLD = 200  # of what was expected, which may repeat a value too

# msgspec's words. A path comes last and has no backticks; what a client wrote may stand before it.
_MESSAGE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$\.?([^`]*)`)?", re.DOTALL)
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"

Body = TypeVar("Body", bound=Struct)


class _Peek(Struct):
    """The key that tells whose wire format a body is in."""

    inputs: Raw | UnsetType = UNSET


def is_for_tgi(body: bytes) -> bool:
    """Whether a body asks with `inputs`, which is how TGI's clients ask. False for what is no body at all."""
    try:
        return msgspec.json.decode(body, type=_Peek).inputs is not UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def decode(body: bytes, kind: type[Body], strict: bool = True) -> Body:
    """The body as a checked value; if not strict, numbers may be written as text. Raises InvalidRequest by field."""
    try:
        body.decode()  # msgspec does not look at the text in what it skips or leaves raw
        value = msgspec.json.decode(body, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:  # some hundred levels are too much for msgspec itself
        raise _too_deep() from None
    if not is_shallow(body):
        raise _too_deep()
    return value


def _too_deep() -> InvalidRequest:
    return InvalidRequest(
        f"the body is nested too deeply; at most {MAX_JSON_DEPTH} levels are taken", code="invalid_json"
    )


_STEPS = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")  # one level in, one level out, as signed bytes
_NO_STEPS = bytes(set(range(256)) - set(b'[{]}"'))


def is_shallow(body: bytes) -> bool:
    """Whether no value of valid JSON stands deeper than MAX_JSON_DEPTH. Most bodies are done with counting brackets."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return True
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_texts = unescaped.translate(_STEPS, _NO_STEPS).split(b'"')[::2]
    return max(accumulate(array("b", b"".join(outside_texts)))) <= MAX_JSON_DEPTH


def decode_query(query: dict[str, list[str]], kind: type[Body]) -> Body:
    """A query string as the body it stands for: `?prompt=Hello&max_tokens=5&stop=a&stop=b`. Raises InvalidRequest."""
    properties = _properties(kind)
    values = {name: _read_text(properties.get(name, {}), texts) for name, texts in query.items()}
    return decode(msgspec.json.encode(values), kind, strict=False)


@lru_cache
def _properties(kind: type[Struct]) -> dict[str, Any]:
    """A body's fields as JSON schemas, which take milliseconds to put together."""
    properties: dict[str, Any] = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return properties


def _read_text(schema: dict[str, Any], texts: list[str]) -> Any:
    """A field of the query string: several of a name are a list, and an object is written as JSON."""
    kinds = {kind.get("type", "object") for kind in schema.get("anyOf", [schema])}
    if "array" in kinds:
        return texts
    if "object" in kinds:
        # What is wrong with it is told like anything else.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(texts[0])
    return texts[0] if len(texts) == 1 else texts


def _invalid(message: str, body: bytes, kind: type[Struct]) -> InvalidRequest:
    """msgspec's `Expected ... - at $.field`, taken apart, with the value that stands there."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    expected, param = match[1], match[2] or None
    if expected.startswith(_UNKNOWN):
        return _unknown(expected.removeprefix(_UNKNOWN).removesuffix("`"), param, kind)
    if expected.startswith(_MISSING):
        name = expected.removeprefix(_MISSING).removesuffix("`")
        param = f"{param}.{name}" if param else name
        return InvalidRequest(f"{param} is missing", param=param)
    expected = expected[0].lower() + expected[1:].replace(" | null", "").replace("`", "")
    return InvalidRequest(
        f"{param or 'the body'}{_value_of(param, body)}: {_shortened(expected, MAX_EXPECTED_TOLD)}", param=param
    )


def _unknown(field: str, param: str | None, kind: type[Struct]) -> InvalidRequest:
    field, known = _shortened(field, MAX_VALUE_TOLD), _fields_at(kind, param)
    close = get_close_matches(field, known, n=1)
    meant = f"did you mean {close[0]!r}? The" if close else "the"
    where = f" in {param}" if param else ""
    return InvalidRequest(
        f"unknown field {field!r}{where}; {meant} fields are {', '.join(known)}",
        param=f"{param}.{field}" if param else field,
        code="unknown_field",
    )


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


def _fields_at(kind: type[Struct], param: str | None) -> list[str]:
    """The fields of a body, or of the object that stands in one of its fields."""
    for name in (param or "").split("."):
        inner = (_struct_in(field.type) for field in msgspec.structs.fields(kind) if field.name == name)
        kind = next(inner, None) or kind
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _struct_in(kind: Any) -> type[Struct] | None:
    """The body that an annotation speaks of: `Annotated[GrammarField | None, ...]` of a GrammarField."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    return next(filter(None, map(_struct_in, get_args(kind))), None)


def _value_of(param: str | None, body: bytes) -> str:
    """What the client sent for a field, if it is short enough to be told back."""
    if len(body) > LARGEST_BODY_READ_TWICE:
        return ""
    try:
        value = msgspec.json.decode(body)
        for name in (param or "").split("."):
            value = value[name]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""
    told = repr(value)
    return f" = {told}" if len(told) <= MAX_VALUE_TOLD else ""


def encode(response: Any) -> bytes:
    """A response as JSON bytes."""
    return _encoder.encode(response)


_encoder = msgspec.json.Encoder()
