"""How long a step takes on a device, from its data sheet: the larger of the time to read and the time to compute.

The model is the roofline (Williams, Waterman, Patterson, 2009). Its *arithmetic intensity* is the number of operations
for each byte that is read. Below the device's own ratio a step waits for memory, above it for arithmetic.
"""

from __future__ import annotations

from math import ceil

from msgspec import Struct

from servekit.planning.devices import Device
from servekit.planning.model_shape import ModelShape
from servekit.protocol.messages import StepPlan
from servekit.simulation.model import num_attention_pairs

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


class Roofline(Struct, frozen=True, kw_only=True):
    """A step's time. All times are of one rank, in seconds."""

    dense_weights_s: float  # to read everything but experts, once
    experts_s: float  # to read all experts, once
    num_experts: int
    num_experts_per_token: int
    token_s: float  # to multiply one token by the weights
    context_s: float  # to read keys and values of one token
    attention_s: float  # to compute with one pair of tokens
    exchange_s: float  # between ranks, for each step
    exchange_token_s: float  # and for each token in it
    overhead_s: float = OVERHEAD_S

    def duration_s(self, plan: StepPlan) -> float:
        """A step's duration."""
        num_context = sum(chunk.start for chunk in plan.chunks)
        return self.step_s(plan.num_tokens, num_context, num_attention_pairs(plan))

    def step_s(self, num_tokens: int, num_context: float, num_pairs: float = 0.0) -> float:
        """The same by numbers: tokens computed, tokens whose keys are read, pairs of tokens in prompts."""
        weights_s = max(self.weights_s(num_tokens), num_tokens * self.token_s)
        attention_s = max(num_context * self.context_s, (num_pairs + num_context) * self.attention_s)
        return self.overhead_s + weights_s + attention_s + self.exchange_s + num_tokens * self.exchange_token_s

    def weights_s(self, num_tokens: int) -> float:
        """To read the weights that so many tokens need: each token chooses its experts, and they overlap."""
        if not self.num_experts:
            return self.dense_weights_s
        missed = (1.0 - self.num_experts_per_token / self.num_experts) ** num_tokens
        return self.dense_weights_s + (1.0 - missed) * self.experts_s


def make_roofline(layout: Layout, device: Device) -> Roofline:
    """Compute the times of a model on a device."""
    shape, ranks = layout.shape, layout.tensor_parallel_size
    bytes_per_s = MEMORY_EFFICIENCY * device.bytes_per_s
    data_type = COMPUTES_IN.get(layout.weight_format, "bfloat16")
    flop_per_s = COMPUTE_EFFICIENCY * device.flop_per_s(data_type)
    num_bytes = layout.num_weight_bytes
    num_expert_bytes = num_bytes * shape.num_expert_parameters / shape.num_parameters
    num_exchanges = 2 * shape.num_layers if ranks > 1 else 0
    exchanged_bytes = num_exchanges * 2 * shape.hidden_size * 2 * (ranks - 1) / ranks
    return Roofline(
        dense_weights_s=(num_bytes - num_expert_bytes) / bytes_per_s,
        experts_s=num_expert_bytes / bytes_per_s,
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_token,
        token_s=FLOP_PER_WEIGHT * shape.num_active_parameters / ranks / flop_per_s,
        context_s=layout.kv_bytes_per_token / bytes_per_s,
        attention_s=_flop_per_pair(shape) / ranks / (COMPUTE_EFFICIENCY * device.flop_per_s("bfloat16")),
        exchange_s=num_exchanges * ALL_REDUCE_S,
        exchange_token_s=exchanged_bytes / (device.link_gb_s * 1e9),
    )


def arithmetic_intensity(layout: Layout, num_tokens: int, num_context: float, num_pairs: float = 0.0) -> float:
    """Operations of a step for each byte that it reads."""
    shape = layout.shape
    flop: float = FLOP_PER_WEIGHT * shape.num_active_parameters * num_tokens
    flop += _flop_per_pair(shape) * (num_pairs + num_context)
    ranks = layout.tensor_parallel_size
    return flop / (ranks * (layout.num_weight_bytes + num_context * layout.kv_bytes_per_token))


def _flop_per_pair(shape: ModelShape) -> int:
    """Operations of attention for a token and one that it attends to: a score, and a part of the weighted sum."""
    return FLOP_PER_WEIGHT * shape.num_layers * shape.num_heads * (shape.key_dim + shape.value_dim)
