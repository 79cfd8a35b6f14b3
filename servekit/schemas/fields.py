"""The fields that every door takes, with their bounds; what a door calls differently stands in its own module.

Every field may be null, which is the same as leaving it out: clients send their unset options that way.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from servekit.errors import InvalidRequest
from servekit.generation_request import Sampling

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_PROMPTS = 65536  # far beyond what a server admits; a longer list is not even looked at

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NumAnswers = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Milliseconds = Annotated[int, Meta(ge=1, le=24 * 3600 * 1000)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bound = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def told(text: str) -> Meta:
    """A field's meaning, for /openapi.json and the table in the docs."""
    return Meta(description=text)


class CommonFields(Struct, kw_only=True):
    """How to choose tokens, and what the answer is worth when."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=100.0)] | None, told("0 is greedy; the model's own by default")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None, told("of the so many likeliest; 0 and -1 are off")
    ] = None
    top_p: Annotated[Annotated[float, Meta(gt=0.0, le=1.0)] | None, told("of the likeliest, up to this mass")] = None
    min_p: Annotated[Annotated[float, Meta(ge=0.0, le=1.0)] | None, told("at least this share of the likeliest")] = None
    typical_p: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None, told("of the least surprising, up to this mass")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0.0, le=10.0)] | None, told("for tokens of prompt and output; 1 is off")
    ] = None
    presence_penalty: Annotated[Penalty | None, told("for tokens that the output has")] = None
    frequency_penalty: Annotated[Penalty | None, told("for each time that the output has a token")] = None
    logit_bias: Annotated[
        Annotated[dict[TokenId, Bias], Meta(max_length=300)] | None, told("token id to what its logit gets added")
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None, told("no other token is chosen")
    ] = None
    bad_words: Annotated[
        Annotated[list[Word], Meta(max_length=64)] | None, told("texts whose tokens never follow each other")
    ] = None
    min_tokens: Annotated[Bound | None, told("before so many tokens nothing ends the answer")] = None
    seed: Annotated[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None, told("the same seed, the same answer")] = (
        None
    )
    stop: Annotated[StopString | list[StopString] | None, told("texts that end the answer; they are cut off")] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=256)] | None, told("tokens that end the answer")
    ] = None
    include_stop_str_in_output: Annotated[bool | None, told("leave what ended the answer in its text")] = None
    ignore_eos: Annotated[bool | None, told("go on behind the model's own end")] = None
    skip_special_tokens: Annotated[bool | None, told("special tokens are not in the text; true by default")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)] | None, told("lower is sooner, with --scheduling-policy priority")
    ] = None
    ttft_ms: Annotated[Milliseconds | None, told("no first token by then, and the request ends")] = None
    deadline_ms: Annotated[Milliseconds | None, told("not finished by then, and the request ends")] = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None, told("tokens in one event of a stream; the server's own by default")
    ] = None

    def common(self, do_sample: bool | None = None) -> dict[str, Any]:
        """These fields as a GenerationRequest has them. Raises InvalidRequest for what no type can express."""
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are taken", param="stop")
        said = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | {"do_sample": do_sample}
        return {
            "sampling": Sampling(**said),
            "priority": self.priority or 0,
            "ttft_ms": self.ttft_ms,
            "deadline_ms": self.deadline_ms,
            "stream_interval": self.stream_interval,
        }


_SAMPLING_FIELDS = tuple(name for name in Sampling.__struct_fields__ if name != "do_sample")


def at_least(best_of: int | None, n: int) -> int:
    """How many answers are computed for each prompt. Raises InvalidRequest if fewer than are given."""
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of = {best_of} is less than n = {n}", param="best_of")
    return best_of or n


class Usage(Struct):
    """What a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int  # of the prompt tokens, found in the prefix cache
