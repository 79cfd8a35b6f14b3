"""Estimate the time of a step from a device's data sheet: the larger of the times to read and to compute.

The model is the roofline (Williams, Waterman, Patterson, 2009). Its *arithmetic intensity* is the number of operations
for each byte that is read. Below the device's own ratio a step waits for memory, above it for arithmetic.
"""

from __future__ import annotations

from math import ceil

from msgspec import Struct

from servekit.planning.devices import Device
from servekit.planning.model_shape import ModelShape
from servekit.protocol.messages import StepPlan

WEIGHT_BITS = {  # of one weight of a layer, with the scale of its row or of 128 weights
    "float32": 32.0,
    "bfloat16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "w4a8": 4.125,
    "int4": 4.125,
    "nf4": 4.25,
}
COMPUTES_IN = {"float32": "float32", "fp8": "fp8", "int8": "int8", "w4a8": "int8"}  # all others in bfloat16
EMBEDDING_BITS = {"float32": 32.0, "bfloat16": 16.0}  # 8 in all quantized formats
KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1}
SCALE_BYTES = 4  # of a quantized vector of keys or values
FLOP_PER_WEIGHT = 2  # a multiplication and an addition
# What well-made kernels reach of the data sheet: of the bandwidth in decode steps, of the arithmetic in prompts.
MEMORY_EFFICIENCY, COMPUTE_EFFICIENCY = 0.85, 0.6
OVERHEAD_S = 300e-6  # of a step beside its kernels: sampling, launches, the way to the scheduler and back
ALL_REDUCE_S = 10e-6  # of one exchange between ranks, without its bytes


class Layout(Struct, frozen=True, kw_only=True):
    """How a model is kept on its devices."""

    shape: ModelShape
    weight_format: str = "bfloat16"
    kv_format: str = "bfloat16"
    tensor_parallel_size: int = 1
    num_weight_bytes_known: int | None = None  # of all ranks, where the checkpoint's files say it

    @property
    def num_weight_bytes(self) -> int:
        """Of one rank."""
        total = self.num_weight_bytes_known
        if total is None:
            bits = WEIGHT_BITS[self.weight_format] * self.shape.num_layer_parameters
            bits += EMBEDDING_BITS.get(self.weight_format, 8.0) * self.shape.num_embedding_parameters
            total = ceil(bits / 8)
        return ceil(total / self.tensor_parallel_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one rank: each has its share of the heads that have keys, or one that others have, too."""
        shape = self.shape
        heads = ceil(shape.num_kv_heads / self.tensor_parallel_size)
        numbers = shape.num_layers * heads * (shape.key_dim + shape.value_dim)
        scales = shape.num_layers * heads * 2 * SCALE_BYTES if KV_BYTES[self.kv_format] == 1 else 0
        return numbers * KV_BYTES[self.kv_format] + scales

    def num_kv_blocks(self, num_bytes: int, block_size: int) -> int:
        """How many blocks of the KV cache this memory of one rank holds."""
        return max(0, num_bytes) // (self.kv_bytes_per_token * block_size)


class StepTime(Struct, frozen=True):
    """The parts of a step's time, in seconds."""

    read_s: float  # weights, and keys and values
    compute_s: float  # with weights, and attention
    duration_s: float  # the larger one of each pair, exchange and overhead
    num_bytes: float  # that are read
    flop: float  # that are computed

    @property
    def is_memory_bound(self) -> bool:
        """Whether the step waits for memory most of the time."""
        return self.read_s >= self.compute_s

    @property
    def arithmetic_intensity(self) -> float:
        """Operations for each byte that is read."""
        return self.flop / self.num_bytes


class Roofline(Struct, frozen=True, kw_only=True):
    """The times of one rank of a model on a device, in seconds."""

    dense_weights_s: float  # to read everything but experts, once; of the input embedding only rows are read
    experts_s: float  # to read all experts, once
    num_experts: int
    num_experts_per_token: int
    token_s: float  # to multiply one token by the weights of all layers
    head_s: float  # and by the output matrix, where the next token is sampled
    context_s: float  # to read keys and values of one token
    attention_s: float  # to compute with one pair of tokens
    exchange_s: float  # between ranks, for each step
    exchange_token_s: float  # and for each token in it
    bytes_per_s: float
    flop_per_s: float
    attention_flop_per_s: float
    window: int = 0  # tokens that a layer with a sliding window attends to
    window_share: float = 0.0  # the share of the layers that have one
    overhead_s: float = OVERHEAD_S

    def duration_s(self, plan: StepPlan) -> float:
        """A step's duration."""
        num_context = sum(self.num_attended(chunk.start) for chunk in plan.chunks)
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        prompts = (chunk for chunk in plan.chunks if chunk.num_tokens > 1)
        num_pairs = sum(self.num_pairs(chunk.start, chunk.num_tokens) for chunk in prompts)
        return self.step(plan.num_tokens, num_sampled, num_context, num_pairs).duration_s

    def num_attended(self, num_context: float) -> float:
        """How many of the tokens before it a token attends to, as a mean over all layers."""
        return num_context - self.window_share * max(0.0, num_context - self.window)

    def num_pairs(self, start: int, num_tokens: int) -> float:
        """Pairs of a token of a chunk and one that it attends to, as a mean over all layers."""
        end = start + num_tokens
        outside = (max(0.0, end - self.window) ** 2 - max(0.0, start - self.window) ** 2) / 2
        return num_tokens * (start + num_tokens / 2) - self.window_share * outside

    def step(self, num_tokens: int, num_sampled: int, num_context: float, num_pairs: float = 0.0) -> StepTime:
        """Return the time of a step from counts: of tokens that are computed, and of those that are sampled.

        `num_context` is the number of tokens whose keys are read, and `num_pairs` that of pairs of a query and a key in
        prompts. Both are means over all layers, as `num_attended` and `num_pairs` compute them.
        """
        weights_s = self.weights_s(num_tokens)
        multiply_s = num_tokens * self.token_s + num_sampled * self.head_s
        context_s = num_context * self.context_s
        attention_s = (num_pairs + num_context) * self.attention_s
        exchange_s = self.exchange_s + num_tokens * self.exchange_token_s
        duration_s = max(weights_s, multiply_s) + max(context_s, attention_s) + exchange_s + self.overhead_s
        read_s = weights_s + context_s
        flop = multiply_s * self.flop_per_s + attention_s * self.attention_flop_per_s
        return StepTime(read_s, multiply_s + attention_s, duration_s, read_s * self.bytes_per_s, flop)

    def weights_s(self, num_tokens: int) -> float:
        """To read the weights that so many tokens need: each token chooses its experts, and they overlap."""
        if not self.num_experts:
            return self.dense_weights_s
        missed = (1.0 - self.num_experts_per_token / self.num_experts) ** num_tokens
        return self.dense_weights_s + (1.0 - missed) * self.experts_s


def make_roofline(layout: Layout, device: Device) -> Roofline:
    """Compute the times of a model on a device. Raises ConfigError if its data sheet lacks a figure."""
    shape, ranks = layout.shape, layout.tensor_parallel_size
    bytes_per_s = MEMORY_EFFICIENCY * device.bytes_per_s
    flop_per_s = COMPUTE_EFFICIENCY * device.flop_per_s(COMPUTES_IN.get(layout.weight_format, "bfloat16"))
    attends_in = "float32" if layout.weight_format == "float32" else "bfloat16"
    attention_flop_per_s = COMPUTE_EFFICIENCY * device.flop_per_s(attends_in)
    num_bytes = layout.num_weight_bytes
    num_expert_bytes = num_bytes * shape.num_expert_parameters / shape.num_parameters
    num_looked_up = shape.num_embedding_parameters - shape.num_head_parameters
    num_embedding_bytes = num_bytes * num_looked_up / shape.num_parameters
    num_exchanges = 2 * shape.num_layers if ranks > 1 else 0
    exchanged_bytes = num_exchanges * 2 * shape.hidden_size * 2 * (ranks - 1) / ranks
    return Roofline(
        dense_weights_s=(num_bytes - num_expert_bytes - num_embedding_bytes) / bytes_per_s,
        experts_s=num_expert_bytes / bytes_per_s,
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_token,
        token_s=FLOP_PER_WEIGHT * shape.num_active_layer_parameters / ranks / flop_per_s,
        head_s=FLOP_PER_WEIGHT * shape.num_head_parameters / ranks / flop_per_s,
        context_s=layout.kv_bytes_per_token / bytes_per_s,
        attention_s=_flop_per_pair(shape) / ranks / attention_flop_per_s,
        exchange_s=num_exchanges * ALL_REDUCE_S,
        exchange_token_s=exchanged_bytes / (device.link_gb_s * 1e9),
        bytes_per_s=bytes_per_s,
        flop_per_s=flop_per_s,
        attention_flop_per_s=attention_flop_per_s,
        window=shape.window or 0,
        window_share=shape.num_window_layers / shape.num_layers,
    )


def _flop_per_pair(shape: ModelShape) -> int:
    """Operations of attention for a token and one that it attends to: a score, and a part of the weighted sum."""
    return FLOP_PER_WEIGHT * shape.num_layers * shape.num_heads * (shape.key_dim + shape.value_dim)
