"""Define the sampling parameters: how the next token is chosen, and when to stop. One frozen value per sequence."""

from __future__ import annotations

from msgspec import Struct

MAX_TOP_LOGPROBS = 20  # of the likeliest alternatives that a request may ask for, at each token


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Sampling parameters with every default already resolved.

    The optional fields of requests are in `api/schemas`; a value that reaches the workload manager has no unknowns
    left. In particular `seed` is always set, also when the client gave none: randomness is a function of (seed,
    position), so a preempted sequence that is computed again samples the same tokens again.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    typical_p: float = 1.0  # 1 is off
    repetition_penalty: float = 1.0  # over prompt and output; 1 is off
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # only these may be chosen; empty is off
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that may not follow each other
    grammar: str | None = None  # that the answer must follow, in llguidance's format
    min_tokens: int = 0  # before that many, no token ends the answer
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # whether what stopped the answer is part of its text
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # in the text
    visible_token_ids: tuple[int, ...] = ()  # special tokens that are in the text nevertheless
    logprobs: int | None = None  # of each output token, and of so many of the likeliest alternatives; None is off
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    prediction: tuple[int, ...] = ()  # a text that the answer may repeat: drafts can be looked up in it

    @property
    def ends_at_eos(self) -> bool:
        """Whether an end-of-sequence token ends the answer. With a grammar it always does: nothing may follow it."""
        return not self.ignore_eos or self.grammar is not None

    def stop_set(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the answer: the model's own, unless they are ignored, and the client's."""
        return (eos_token_ids if self.ends_at_eos else frozenset[int]()).union(self.stop_token_ids)

    @property
    def bans_tokens(self) -> bool:
        """Whether some tokens may not be chosen, at least for a time."""
        return bool(self.allowed_token_ids or self.bad_words or self.min_tokens)

    @property
    def looks_back(self) -> bool:
        """Whether the choice of the next token depends on the tokens so far, beyond the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.grammar is not None
            or any(len(token_ids) > 1 for token_ids in self.bad_words)
        )
