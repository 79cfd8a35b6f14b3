"""A request for generation, in one form for all HTTP APIs.

Each API converts its request body to a GenerationRequest. The code below the API does not depend on which API it was.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import Any

from msgspec import Struct

from servekit.protocol.lora import LoraAdapter
from servekit.requests.time_causes import RequestTimes, TimeCause


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON = "json"  # any JSON object
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"  # one of several given texts
    COMPOSED = "composed"  # Lark with other grammars as parts, which the server writes itself


class Grammar(Struct, frozen=True):
    """A grammar that every answer must match, as the client wrote it. `text` is JSON for schemas and for choices."""

    kind: GrammarKind
    text: str
    param: str  # the name of the field in the client's request, for errors; of a part, what it is, or ""
    parts: tuple[Grammar, ...] = ()  # of a composed one, whose text names them @part0, @part1, …


class Prompt(Struct, frozen=True, gc=False):
    """One prompt, as text or as token ids."""

    # Token ids are 32-bit integers. Those of a large body are arrays, because the garbage collector does not look into
    # these. An array takes longer to make than a list, so those of a small body become arrays when they are encoded.
    content: str | list[int] | array[int]
    param: str  # the name of the field in the client's request, for errors
    add_special_tokens: bool = True  # those that the model expects around a text, such as <bos>


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters that the client set; None for others. `SamplingParams` documents their meaning."""

    temperature: float | None = None
    do_sample: bool | None = None  # false: greedy; true: not greedy, even if that is the model's default
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class Chat(Struct, frozen=True, kw_only=True):
    """A conversation that is not rendered here, because the model runs on another server."""

    messages: list[dict[str, Any]]  # as chat templates expect them
    tools: list[dict[str, Any]] | None = None  # as OpenAI's API writes them
    tool_choice: str | dict[str, Any] | None = None  # the same
    is_parallel: bool | None = None  # whether an answer may have several calls
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    template_variables: dict[str, Any] = {}
    adds_generation_prompt: bool = True
    continues_final_message: bool = False


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """Prompts, and how to answer each of them."""

    prompts: list[Prompt]
    sampling: Sampling
    max_tokens: int | None = None  # None: as many as fit into the context
    grammar: Grammar | None = None
    n: int = 1  # answers to each prompt
    best_of: int = 1  # answers computed for each prompt; the n best are returned
    logprobs: int | None = None  # for each output token: its logprob, and those of this many top tokens
    prompt_logprobs: int | None = None
    truncate: int | None = None  # keep only this many tokens at the end of each prompt
    priority: int = 0
    ttft_ms: int | None = None
    deadline_ms: int | None = None
    stream_interval: int | None = None  # tokens of a sequence per event; None: the server's setting
    max_drafts: int | None = None  # that a step may verify for a sequence; None: the server's setting
    adapter: LoraAdapter | None = None  # what the model computes with; None: itself
    prediction: str | None = None  # a text that the answers may repeat
    suffix: str | None = None  # a text that comes after the answers, which fill in what is before it
    markers: tuple[str, ...] = ()  # texts that stay in answers, even if they are special tokens
    chat: Chat | None = None  # in place of the text of its only prompt
    returns_token_ids: bool = False  # whether the answer has the ids of its tokens
    explain: bool = False  # whether the answer says where the request's time went
    times: RequestTimes | None = None  # of its stages; the code that ends a stage marks it

    def mark(self, cause: TimeCause) -> None:
        """Note what the time since the last mark was for."""
        if self.times is not None:
            self.times.mark(cause)

    @property
    def num_sequences(self) -> int:
        """The number of answers that are computed."""
        return len(self.prompts) * self.best_of

    @property
    def wanted_logprobs(self) -> int | None:
        """The logprobs to compute. `best_of` needs them to rank the answers, even if the client does not."""
        return 0 if self.logprobs is None and self.best_of > self.n else self.logprobs
