"""What a client wants generated, whichever door it came through.

A door's body becomes one of these, and from then on nobody asks which door it was.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON = "json"  # any JSON object
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"  # one of several texts


class Grammar(Struct, frozen=True):
    """What every answer must match, as the client wrote it. `text` is JSON for schemas and for choices (a list)."""

    kind: GrammarKind
    text: str
    param: str  # what the client calls it


class Prompt(Struct, frozen=True):
    """One prompt, as text or as token ids."""

    content: str | list[int]
    param: str  # what the client calls it
    add_special_tokens: bool = True  # those that the model expects around a text


class Sampling(Struct, frozen=True, kw_only=True):
    """How to choose tokens, as far as the client said; None is left open. `SamplingParams` says what each means."""

    temperature: float | None = None
    do_sample: bool | None = None  # false is greedy, and true is not, whatever the model's own default
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


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """Prompts, and how each is to be answered."""

    prompts: list[Prompt]
    sampling: Sampling
    max_tokens: int | None = None  # None: as many as the context holds
    grammar: Grammar | None = None
    n: int = 1  # answers to each prompt
    best_of: int = 1  # answers computed for each prompt, of which the n best are given
    logprobs: int | None = None  # of each output token, and of so many of the likeliest beside it
    prompt_logprobs: int | None = None
    truncate: int | None = None  # the last so many tokens of each prompt are kept
    priority: int = 0
    ttft_ms: int | None = None
    deadline_ms: int | None = None
    stream_interval: int | None = None  # tokens of a sequence that are handed out together; None: the server's own

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.best_of

    @property
    def wanted_logprobs(self) -> int | None:
        """What must be computed: to find the best, somebody has to know how good each is."""
        return 0 if self.logprobs is None and self.best_of > self.n else self.logprobs
