"""Families whose layers do their attention themselves: let it run over pages, too.

Each adapter replaces one method, on the instances. It computes queries, keys and values as the family does, and hands
them to the attention implementation that is set. With `eager`, the family's own method runs, so the self-check
compares with transformers' own code.

ALiBi adds a slope times the distance to each score. A softmax does not change when the same number is added to all
scores of a query. So slope times the key's position does the same, and that is a product: it is computed by a few more
columns of queries and keys (Press et al., Train Short, Test Long, 2022).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workers.attention.selector import PAGED_ATTENTION
from workers.loading.refusals import refusal

OWN_IMPLEMENTATION = "eager"  # with which these models are made
ALIBI_COLUMNS = 8  # four are used; the others keep the rows aligned
# bfloat16 has eight bits of precision: a position is the sum of two numbers that it has exactly.
POSITION_STEP = 256


def has_own_attention(config: Any) -> bool:
    """Whether the configuration is that of a family with an adapter here."""
    return config.model_type in _MODEL_TYPES


def adapt_own_attention(model: PreTrainedModel) -> None:
    """Let the model's layers use the attention implementation that is set, from now on. Others stay as they are."""
    if not has_own_attention(model.config):
        return
    attention = _Attention()
    for module in model.modules():
        make = _ADAPTERS.get(type(module).__name__)
        if make is not None:
            if not hasattr(module, "layer_idx"):
                module.layer_idx = module.layer_id  # GPT-Neo's name
            name, adapted = make(module, attention)
            setattr(module, name, _Switched(getattr(module, name), adapted, attention))
    # A draft model's runner calls the decoder alone, without the head.
    for called in (model, model.base_model):
        called.register_forward_pre_hook(attention.keep, with_kwargs=True)
        # Nothing is kept beyond the call, or a step would keep the KV cache's memory after its runner is dropped.
        called.register_forward_hook(attention.forget, always_call=True)
    model.set_attn_implementation = attention.choose  # type: ignore[method-assign, assignment]


class _Attention:
    """The attention implementation of one model, and what the model's present call hands to it."""

    def __init__(self) -> None:
        self.implementation = PAGED_ATTENTION
        self.position_ids: Tensor | None = None  # [1, num_tokens]
        self._given: dict[str, Any] | None = None  # None outside of a call

    def choose(self, implementation: str) -> None:
        self.implementation = implementation

    def keep(self, model: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Keep what the model's own code would drop, or would not take."""
        if self._given is not None:
            return arguments, options  # the model calls its decoder, with what was passed on
        known = inspect.signature(type(model).forward).parameters
        passed_on = {name: value for name, value in options.items() if name in known}
        if self.implementation != OWN_IMPLEMENTATION:
            passed_on.pop("attention_mask", None)  # its form is not known to the families' own code
        self.position_ids = options.get("position_ids")
        self._given = {name: value for name, value in options.items() if name not in known and name != "position_ids"}
        return arguments, passed_on

    def forget(self, *_: Any) -> None:
        self.position_ids, self._given = None, None

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return [1, num_tokens, num_heads, head_dim] of [1, num_heads, num_tokens, head_dim] each."""
        assert self._given is not None
        attend: Any = ALL_ATTENTION_FUNCTIONS[self.implementation]
        output: Tensor = attend(module, query, key, value, None, dropout=0.0, **options, **self._given)[0]
        return output

    def with_alibi(self, query: Tensor, key: Tensor, slopes: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Return queries and keys with columns whose product, scaled, is slope times position.

        `slopes` is [num_heads] float32.
        """
        assert self.position_ids is not None
        positions = self.position_ids[0]
        low = positions.remainder(POSITION_STEP)
        parts = torch.stack((positions - low, low), dim=-1).repeat(1, 2)
        exact = (slopes / scaling).to(query.device)
        rounded = exact.to(query.dtype)
        rest = (exact - rounded.float()).to(query.dtype)
        factors = torch.stack((rounded, rounded, rest, rest), dim=-1)
        num_tokens, num_heads = query.shape[2], query.shape[1]
        empty = query.new_zeros(1, num_heads, num_tokens, ALIBI_COLUMNS - 4)
        query = torch.cat((query, factors[None, :, None].expand(1, -1, num_tokens, -1), empty), dim=-1)
        key_parts = parts.to(key.dtype)[None, None].expand(1, key.shape[1], -1, -1)
        return query, torch.cat((key, key_parts, empty[:, : key.shape[1]]), dim=-1)


class _Switched:
    """A method that is the family's own with its own attention implementation, and the adapter otherwise."""

    def __init__(self, own: Callable[..., Any], adapted: Callable[..., Any], attention: _Attention) -> None:
        self._own, self._adapted, self._attention = own, adapted, attention

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        is_own = self._attention.implementation == OWN_IMPLEMENTATION
        return (self._own if is_own else self._adapted)(*arguments, **options)


Adapter = tuple[str, Callable[..., Any]]  # the method's name, and what replaces it


def _weighing(scaling: Callable[[Any], float], window: Callable[[Any], int | None] = lambda _: None) -> Any:
    """Return the adapter of modules whose method `_attn` weighs values by queries and keys, and does nothing else."""

    def make(module: Any, attention: _Attention) -> Adapter:
        options = {"scaling": scaling(module), "sliding_window": window(module)}

        def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            output = attention(module, query.to(value.dtype), key.to(value.dtype), value, **options)
            return output.transpose(1, 2), None

        return "_attn", attend

    return make


def _bloom(module: Any, attention: _Attention) -> Adapter:
    # A family is imported only if it is served, because the others would delay the start of every worker.
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)[:, 0].diff()[:, 0]

    def forward(hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        query, key = attention.with_alibi(query, key, slopes, module.inv_norm_factor)
        output = attention(module, query, key, value, scaling=module.inv_norm_factor)
        return module.dense(output.flatten(2)) + residual, None

    return "forward", forward


def _mpt(module: Any, attention: _Attention) -> Adapter:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = build_mpt_alibi_tensor(module.n_heads, 2)[:, 0].diff()[:, 0].float()

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        parts = (part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
        query, key, value = parts
        query, key = attention.with_alibi(query, key, slopes, module.softmax_scale)
        output = attention(module, query, key, value, scaling=module.softmax_scale)
        return module.out_proj(output.flatten(2)), None

    return "forward", forward


def _falcon(module: Any, attention: _Attention) -> Adapter:
    if module.config.alibi:
        raise refusal(
            "FalconForCausalLM",
            "its configuration has `alibi`, and these positions are rounded in a way that pages do not reproduce",
            "Falcon models with rotary positions (falcon-7b, falcon-40b, falcon-11B) are served",
        )

    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, None]:
        query, key, value = _falcon_heads(module, module.query_key_value(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        output = attention(module, query, key, value, scaling=module.inv_norm_factor)
        return module.dense(output.flatten(2)), None

    return "forward", forward


def _falcon_heads(module: Any, mixed: Any) -> list[Tensor]:
    """Return queries, keys and values, with as many heads as there are weights for."""
    num_groups = module.num_kv_heads if module.new_decoder_architecture else 1
    if not module.new_decoder_architecture and not module.multi_query:  # each head's three are neighbours
        return [part.transpose(1, 2) for part in mixed.unflatten(-1, (module.num_heads, 3, -1)).unbind(3)]
    grouped = mixed.unflatten(-1, (num_groups, -1, module.head_dim))
    parts = grouped[..., :-2, :], grouped[..., -2:-1, :], grouped[..., -1:, :]
    return [part.flatten(2, 3).transpose(1, 2) for part in parts]


# By the class of the module.
_ADAPTERS: dict[str, Callable[[Any, _Attention], Adapter]] = {
    "BloomAttention": _bloom,
    "CodeGenAttention": _weighing(lambda module: 1.0 / math.sqrt(module.head_dim)),
    "FalconAttention": _falcon,
    "GPTJAttention": _weighing(lambda module: 1.0 / module.scale_attn),
    "GPTNeoSelfAttention": _weighing(
        lambda _: 1.0, lambda module: module.config.window_size if module.attention_type == "local" else None
    ),
    "GPTNeoXJapaneseAttention": _weighing(lambda module: 1.0 / module.norm_factor),
    "MptAttention": _mpt,
}
_MODEL_TYPES = frozenset({"bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt"})
