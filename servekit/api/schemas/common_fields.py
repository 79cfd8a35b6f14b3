"""Define the fields that all APIs share, with their bounds. Fields with another name in one API are in its own module.

Every field may be null, which is the same as leaving it out: clients send unset options as null.

To add a sampling parameter, add a field of the same name to `CommonFields` and to `Sampling`
(servekit/requests/generation.py); `common` passes it on. docs/contributing.md names the other files. Any other field is
also added to `common`.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from servekit.errors import InvalidRequest
from servekit.protocol.sampling_params import MAX_TOP_LOGPROBS
from servekit.protocol.speculative_config import MAX_DRAFTS
from servekit.requests.generation import Sampling

MAX_STOP_STRINGS = 16
MAX_ANSWERS = 128
MAX_PROMPTS = 2**14  # far more than a server admits; what is made of more would hold the event loop for long

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NumAnswers = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Milliseconds = Annotated[int, Meta(ge=1, le=24 * 3600 * 1000)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bound = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def described(text: str) -> Meta:
    """Attach a field's description, for /openapi.json and the table in docs/parameters.md."""
    return Meta(description=text)


class CommonFields(Struct, kw_only=True):
    """How to sample tokens, when to stop, and the request's priority and deadlines."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=100.0)] | None,
        described("sampling temperature; 0 is greedy; default: the model's own"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        described("sample from the k likeliest tokens; 0 and -1 are off"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        described("sample from the likeliest tokens whose probabilities add up to p"),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        described("drop tokens less likely than this fraction of the likeliest one"),
    ] = None
    typical_p: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        described("sample from the most typical tokens whose probabilities add up to this"),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0.0, le=10.0)] | None,
        described("penalize tokens that occur in the prompt or the output; 1 is off"),
    ] = None
    presence_penalty: Annotated[Penalty | None, described("penalize tokens that occur in the output")] = None
    frequency_penalty: Annotated[Penalty | None, described("penalize tokens by how often they occur in the output")] = (
        None
    )
    logit_bias: Annotated[
        Annotated[dict[TokenId, Bias], Meta(max_length=300)] | None,
        described("map of token id to a number that is added to its logit"),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None,
        described("only these tokens can be generated"),
    ] = None
    bad_words: Annotated[
        Annotated[list[Word], Meta(max_length=64)] | None, described("texts whose token sequences are never generated")
    ] = None
    min_tokens: Annotated[Bound | None, described("the answer cannot end before this many tokens")] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        described("seed of the random numbers; the same seed gives the same answer"),
    ] = None
    stop: Annotated[
        StopString | list[StopString] | None, described("texts that end the answer; they are not part of it")
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=256)] | None, described("token ids that end the answer")
    ] = None
    include_stop_str_in_output: Annotated[bool | None, described("keep the stop text in the answer")] = None
    ignore_eos: Annotated[bool | None, described("continue after the model's end-of-sequence token")] = None
    skip_special_tokens: Annotated[bool | None, described("leave special tokens out of the text; default: true")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)] | None,
        described("a lower number runs sooner; needs --scheduling-policy priority"),
    ] = None
    ttft_ms: Annotated[Milliseconds | None, described("end the request if it has no first token after this time")] = (
        None
    )
    deadline_ms: Annotated[Milliseconds | None, described("end the request if it is not finished after this time")] = (
        None
    )
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        described("tokens per event of a stream; default: --stream-interval"),
    ] = None
    max_drafts: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] | None,
        described(
            "maximum number of drafts that a step verifies, with --speculative; 0: none; default: the server's K"
        ),
    ] = None

    def common(self, do_sample: bool | None = None) -> dict[str, Any]:
        """Return these fields as arguments of GenerationRequest. Raises InvalidRequest for what no type can express."""
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} texts; the limit is {MAX_STOP_STRINGS}", param="stop")
        sampling = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | {"do_sample": do_sample}
        return {
            "sampling": Sampling(**sampling),
            "priority": self.priority or 0,
            "ttft_ms": self.ttft_ms,
            "deadline_ms": self.deadline_ms,
            "stream_interval": self.stream_interval,
            "max_drafts": self.max_drafts,
        }


_SAMPLING_FIELDS = tuple(name for name in Sampling.__struct_fields__ if name != "do_sample")


def num_computed(best_of: int | None, n: int) -> int:
    """Return how many answers to compute for each prompt. Raises InvalidRequest if best_of is less than n."""
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of = {best_of} is less than n = {n}; raise best_of or lower n", param="best_of")
    return best_of or n


class Usage(Struct):
    """The number of tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int  # of the prompt tokens: those found in the prefix cache
    drafted_tokens: int | UnsetType = UNSET  # verified for the answers; absent if there were none
    accepted_tokens: int | UnsetType = UNSET  # of the drafted tokens: those in the answers
