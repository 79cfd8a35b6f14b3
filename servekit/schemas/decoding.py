"""From bytes to a checked body, and from an answer to bytes. Every refusal names the field, its value and the limit."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from servekit.errors import InvalidRequest

MAX_VALUE_TOLD = 40  # characters of a wrong value that an error repeats

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


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as a checked value. Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def decode_query(query: dict[str, list[str]], kind: type[Body]) -> Body:
    """A query string as the body it stands for: `?prompt=Hello&max_tokens=5&stop=a&stop=b`. Raises InvalidRequest."""
    values = {name: texts[0] if len(texts) == 1 else texts for name, texts in query.items()}
    lists = {field.name for field in msgspec.structs.fields(kind) if "list" in str(field.type)}
    values = {name: [value] if name in lists and isinstance(value, str) else value for name, value in values.items()}
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), msgspec.json.encode(values), kind) from None


def _invalid(message: str, body: bytes, kind: type[Struct]) -> InvalidRequest:
    """msgspec's `Expected ... - at $.field`, taken apart, with the value that stands there."""
    expected, _, path = message.partition(" - at `")
    param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
    if "unknown field" in expected:
        field = expected.split("`")[1]
        known = ", ".join(_fields_at(kind, param))
        where = f" in {param}" if param else ""
        return InvalidRequest(
            f"unknown field {field!r}{where}; the fields are {known}",
            param=f"{param}.{field}" if param else field,
            code="unknown_field",
        )
    expected = expected[0].lower() + expected[1:].replace(" | null", "").replace("`", "")
    return InvalidRequest(f"{param or 'the body'}{_value_of(param, body)}: {expected}", param=param)


def _fields_at(kind: type[Struct], param: str | None) -> list[str]:
    """The fields of a body, or of the object that stands in one of its fields."""
    for field in msgspec.structs.fields(kind):
        if field.name == param:
            inner = next(
                part
                for part in (field.type, *getattr(field.type, "__args__", ()))
                if hasattr(part, "__struct_fields__")
            )
            return _fields_at(inner, None)
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _value_of(param: str | None, body: bytes) -> str:
    """What the client sent for a field, if it is short enough to be told back."""
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
