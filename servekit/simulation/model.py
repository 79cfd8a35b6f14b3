"""Simulate the step times of a device, for `--model sim:SPEC`.

Only the device is simulated. API, scheduler, queues and the worker process are the real ones, so a server can be tried,
and its control plane measured, without weights and without an accelerator.
"""

from __future__ import annotations

import re
from operator import mul

from msgspec import Struct
from msgspec.structs import replace

from servekit.errors import ConfigError
from servekit.latency.step_size import tokens_beyond_breakpoints
from servekit.protocol.messages import StepPlan

PREFIX = "sim:"
DEFAULT_MAX_MODEL_LEN = 32768

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(s|ms|us|ns)")


def is_simulated(model: str) -> bool:
    return model.startswith(PREFIX)


class SimulatedModel(Struct, frozen=True, kw_only=True):
    """What a step takes: `step_s`, and more for each token and each sequence in it. Times in seconds."""

    step_s: float = 0.0
    prefill_s: float = 0.0  # for each token of a chunk but the last
    decode_s: float = 0.0  # for each chunk
    context_s: float = 0.0  # for each token before a chunk, whose KV must be read
    attention_s: float = 0.0  # for each token of a chunk and each token that it attends to, in chunks of several tokens
    beyond16_s: float = 0.0  # for each token of a step beyond the first 16
    beyond64_s: float = 0.0
    beyond256_s: float = 0.0
    draft_s: float = 0.0  # for each draft that is verified
    drafting_s: float = 0.0  # for each round of the drafter, which makes one more draft for each sequence
    load_s: float = 0.0  # until the worker is ready
    acceptance: float = 0.7  # of a draft after accepted ones, with speculative decoding

    def duration_s(self, plan: StepPlan) -> float:
        """A step's duration: linear in its work and in its tokens beyond some numbers (`step_size.py`)."""
        num_chunks = len(plan.chunks)
        duration_s = self.step_s + self.decode_s * num_chunks
        if self.context_s:
            duration_s += self.context_s * sum(chunk.start for chunk in plan.chunks)
        if self.attention_s:
            duration_s += self.attention_s * num_attention_pairs(plan)
        if self.prefill_s or self.draft_s:
            num_drafts = sum(chunk.num_drafts for chunk in plan.chunks)
            duration_s += self.prefill_s * (plan.num_tokens - num_chunks - num_drafts) + self.draft_s * num_drafts
        beyond_s = (self.beyond16_s, self.beyond64_s, self.beyond256_s)
        if any(beyond_s):
            duration_s += sum(map(mul, beyond_s, tokens_beyond_breakpoints(plan.num_tokens)))
        if self.drafting_s:
            duration_s += self.drafting_s * max((chunk.num_drafts for chunk in plan.chunks), default=0)
        return duration_s

    def num_accepted(self, num_drafts: int, step_id: int, slot: int) -> int:
        """How many drafts of a sequence a step accepts, as if by chance: n or more with probability acceptance^n."""
        chance = hash((step_id, slot)) % 2**20 / 2**20
        return sum(chance < self.acceptance**number for number in range(1, num_drafts + 1))


def num_attention_pairs(plan: StepPlan) -> float:
    """How many pairs of a token and one that it attends to a step has, in chunks of several tokens."""
    return sum(
        chunk.num_tokens * (chunk.start + 0.5 * chunk.num_tokens) for chunk in plan.chunks if chunk.num_tokens > 1
    )


# Llama-3.1-8B in bfloat16 on one H100. Its 16 GB of weights are read in 5.1 ms, as measured with CUDA graphs; 60 % of
# 790 TFLOP/s leave 34 us for the 16 GFLOP of a prompt's token; a token of context is 128 KiB, at 3.35 TB/s.
PRESETS = {
    "instant": SimulatedModel(),
    "h100-8b": SimulatedModel(
        step_s=5.1e-3, prefill_s=34e-6, decode_s=20e-6, context_s=39e-9, draft_s=34e-6, load_s=0.5
    ),
}


def parse_simulated(model: str) -> SimulatedModel:
    """Parse `sim:h100-8b`, `sim:step=5ms,decode=20us`, or a preset with some times changed: `sim:h100-8b,load=0s`.

    Raises ConfigError.
    """
    assert is_simulated(model)
    parts = [part.strip() for part in model.removeprefix(PREFIX).split(",")]
    preset = parts.pop(0) if "=" not in parts[0] else "instant"
    known = ", ".join(name.removesuffix("_s") for name in SimulatedModel.__struct_fields__)
    if preset not in PRESETS:
        raise ConfigError(
            f"model {model!r}: unknown preset {preset!r}. Use one of {', '.join(PRESETS)}, or "
            f"{PREFIX}NAME=TIME,... with names from {known}"
        )
    changed: dict[str, float] = {}
    for part in parts:
        name, _, text = part.partition("=")
        found = _DURATION.fullmatch(text)
        if name == "acceptance" and _NUMBER.fullmatch(text) and float(text) <= 1.0:
            changed[name] = float(text)
        elif found is not None and f"{name}_s" in SimulatedModel.__struct_fields__:
            changed[f"{name}_s"] = float(found[1]) * _UNITS[found[2]]
        else:
            raise ConfigError(
                f"model {model!r}: {part!r} is neither NAME=TIME, such as step=5ms, nor acceptance=NUMBER from 0 to 1; "
                f"the names are {known}"
            )
    return replace(PRESETS[preset], **changed)
