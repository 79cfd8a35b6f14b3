"""Request and response bodies of the native routes, and their way to SamplingParams.

Native routes refuse fields they do not know: a misspelt `temprature` is a mistake to report, not to ignore. Numbers
are bounded on both sides where the body becomes an object.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from servekit.errors import InvalidRequest
from servekit.messages import ModelInfo
from servekit.sampling_params import SamplingParams
from servekit.sequence import FinishReason

MAX_STOP_STRINGS = 16
MAX_VALUE_TOLD = 40  # characters of a wrong value that an error repeats

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Milliseconds = Annotated[int, Meta(ge=1, le=24 * 3600 * 1000)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /generate and /generate_stream; `prompt` asks for one text, `prompts` for a list of them."""

    prompt: str | UnsetType = UNSET
    prompts: Annotated[list[str], Meta(min_length=1)] | UnsetType = UNSET
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    typical_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=300)] | None = (
        None
    )
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Meta(ge=1, le=128)] = 1  # answers to each prompt, which is computed once
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # lower is sooner
    ttft_ms: Milliseconds | None = None  # from arrival; no first token by then, and the request ends
    deadline_ms: Milliseconds | None = None  # from arrival; not finished by then, and the request ends

    @property
    def texts(self) -> list[str]:
        """Every prompt, in order."""
        return self.prompts if self.prompts is not UNSET else [self.prompt]  # type: ignore[list-item]

    def name_of(self, index: int) -> str:
        """What the client calls the text at `index`."""
        return "prompt" if self.prompts is UNSET else f"prompts[{index}]"

    @property
    def num_answers(self) -> int:
        return len(self.texts) * self.n

    def sampling(self, model: ModelInfo, room: int, seed: int) -> SamplingParams:
        """Resolve what the client left open: the model's own defaults, as much output as fits, the given seed."""
        return SamplingParams(
            max_tokens=self.max_tokens if self.max_tokens is not None else max(room, 1),
            temperature=self.temperature if self.temperature is not None else model.default_temperature,
            top_k=max(self.top_k if self.top_k is not None else model.default_top_k, 0),
            top_p=self.top_p if self.top_p is not None else model.default_top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            min_tokens=self.min_tokens,
            seed=self.seed if self.seed is not None else seed,
            stop=self._stop_strings(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )

    def _stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Usage(Struct):
    """What a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int  # of the prompt tokens, found in the prefix cache


class GenerateResponse(Struct):
    """Answer to one prompt."""

    id: str
    generated_text: str
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token that ended it; null at the model's own end
    usage: Usage


class BatchGenerateResponse(Struct):
    """Answers to a list of prompts in their order; with `n`, those to the first prompt come first."""

    id: str
    generated_texts: list[str]
    finish_reasons: list[FinishReason]
    usage: Usage


class BasicGenerateResponse(Struct):
    """Answer to one prompt, and nothing else."""

    generated_text: str


class Token(Struct):
    """One generated token; `text` is what it made certain, which may be nothing yet, or more than itself."""

    id: int
    text: str
    special: bool
    logprob: float | None = None


class StreamEvent(Struct):
    """One server-sent event. The last one has the whole text and says why it ended."""

    index: int  # of the token, from 1; where there is none, of the last one
    token: Token | None  # null where the answer ends without another one, at a deadline
    generated_text: str | None = None
    details: None = None  # a key that TGI's clients look for
    id: str | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET


_decoder = msgspec.json.Decoder(GenerateRequest)


def decode_generate_request(body: bytes) -> GenerateRequest:
    """The body as a checked value. Raises InvalidRequest that names the field."""
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if (request.prompt is UNSET) == (request.prompts is UNSET):
        raise InvalidRequest("give either 'prompt' (a string) or 'prompts' (a list of strings)", param="prompt")
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(request.stop)} stop strings; at most {MAX_STOP_STRINGS} are taken", param="stop")
    return request


def _invalid(message: str, body: bytes) -> InvalidRequest:
    """msgspec's `Expected ... - at $.field`, taken apart, with the value that stands there."""
    expected, _, path = message.partition(" - at `")
    param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
    if "unknown field" in expected:
        field = expected.split("`")[1]
        return InvalidRequest(f"unknown field {field!r}; the fields are {_fields()}", param=field, code="unknown_field")
    expected = expected[0].lower() + expected[1:].replace(" | null", "").replace("`", "")
    return InvalidRequest(f"{param or 'the body'}{_value_of(param, body)}: {expected}", param=param)


def _value_of(param: str | None, body: bytes) -> str:
    """What the client sent for a field, if it is short enough to be told back."""
    try:
        value = repr(msgspec.json.decode(body)[param])
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""
    return f" = {value}" if len(value) <= MAX_VALUE_TOLD else ""


def _fields() -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(GenerateRequest))


def encode(response: Any) -> bytes:
    """A response as JSON bytes."""
    return _encoder.encode(response)


_encoder = msgspec.json.Encoder()
