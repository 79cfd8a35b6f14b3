"""Read the reply to a request with several prompts."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Batch(Struct):
    generated_texts: list[str]
    finish_reasons: list[str | None] | None = None
    usage: _Usage | None = None


_decode_batch = msgspec.json.Decoder(_Batch).decode


class GarbledReply(Exception):
    """The reply is not what the API promises; the message says why."""


class BatchAnswer(Struct):
    """The answer to one prompt of a batch."""

    text: str
    num_output_tokens: int | None
    num_prompt_tokens: int | None
    finish_reason: str | None


def read_batch(body: bytes | bytearray, num_prompts: int, max_tokens: int) -> list[BatchAnswer]:
    """Return one answer for each prompt, in their order. Raises GarbledReply.

    The API reports the number of tokens of all answers together. An answer that ended by its length has `max_tokens`;
    the rest of the sum is divided evenly among the others, so a single number may be off while their sum is exact. The
    tokens of prompts are divided likewise. A sum that such answers cannot have is an error.
    """
    try:
        reply = _decode_batch(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise GarbledReply("the reply is not the expected JSON") from None
    reasons = reply.finish_reasons or [None] * num_prompts
    if len(reply.generated_texts) != num_prompts or len(reasons) != num_prompts:
        raise GarbledReply("the number of answers differs from the number of prompts")
    usage = reply.usage or _Usage()
    known = [max_tokens if reason == "length" else None for reason in reasons]
    min_tokens, max_total = sum(each or 0 for each in known), max_tokens * num_prompts
    if usage.completion_tokens is not None and not min_tokens <= usage.completion_tokens <= max_total:
        raise GarbledReply("usage reports a number of tokens that such answers cannot have")
    num_outputs = _divide(usage.completion_tokens, known)
    num_inputs = _divide(usage.prompt_tokens, [None] * num_prompts)
    return [
        BatchAnswer(*answer) for answer in zip(reply.generated_texts, num_outputs, num_inputs, reasons, strict=True)
    ]


def _divide(total: int | None, known: list[int | None]) -> list[int | None]:
    """Divide `total` among the unknown numbers."""
    if total is None:
        return [None] * len(known)
    num_unknown = known.count(None)
    rest = total - sum(number or 0 for number in known)
    share, num_larger = divmod(rest, max(1, num_unknown))
    shares = iter([share + 1] * num_larger + [share] * (num_unknown - num_larger))
    return [next(shares) if number is None else number for number in known]
