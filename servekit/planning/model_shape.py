"""Read a model's size from its config.json: parameters, and keys and values of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from servekit.errors import ConfigError

# Architectures whose feed-forward layers have two matrices; all others have a third one, for the gate.
UNGATED = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "starcoder2"),
        *("bloom", "falcon", "mpt", "codegen", "nemotron"),
    }
)
# Architectures that use the embedding as output matrix unless the configuration says otherwise.
TIED_BY_DEFAULT = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "falcon", "mpt", "starcoder2", "xglm"),
        *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "cohere", "cohere2", "smollm3", "ernie4_5", "lfm2"),
    }
)
# Architectures with a matrix of learned positions.
LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "opt"})
# Architectures in which every n-th layer attends to all tokens, and the others to a window.
LAYERS_PER_FULL_ATTENTION = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
CONFIG_KEY_ALIASES = {  # in the configurations of older architectures
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx"),
    "num_key_value_heads": ("num_kv_heads",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}


class ModelShape(Struct, frozen=True, kw_only=True):
    """The size of a model. Numbers count parameters or elements, not bytes."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int  # of one head
    value_dim: int
    vocab_size: int
    max_model_len: int | None
    num_embedding_parameters: int  # the embedding, and the output matrix where it is another one
    num_layer_parameters: int  # of all layers
    num_active_layer_parameters: int  # of these, what one token is multiplied by: of experts only those that are chosen
    num_experts: int = 0  # in each layer with experts
    num_experts_per_token: int = 0
    num_expert_parameters: int = 0  # of all experts of all layers
    latent_dim: int = 0  # of a token and layer, for models with latent attention (MLA)
    window: int | None = None  # tokens that a layer with a sliding window attends to
    num_window_layers: int = 0  # layers with a sliding window

    @property
    def num_parameters(self) -> int:
        return self.num_embedding_parameters + self.num_layer_parameters

    @property
    def num_active_parameters(self) -> int:
        """The parameters that one sampled token is multiplied by: its embedding is only looked up."""
        return self.num_active_layer_parameters + self.num_head_parameters

    @property
    def num_head_parameters(self) -> int:
        """The output matrix, by which only positions are multiplied whose next token is sampled."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_numbers_per_token(self) -> int:
        """The numbers of keys and values that servekit keeps for a token, over all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)

    @property
    def kv_vectors_per_token(self) -> int:
        """How many vectors these are: a vector has a scale of its own where it is quantized."""
        return self.num_layers * self.num_kv_heads * 2


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Compute the shape from the contents of config.json. Raises ConfigError if a number is missing or no number."""
    text = config.get("text_config")
    if isinstance(text, Mapping):  # a model of text and images: its language part
        config = {"model_type": config.get("model_type"), **text}
    reader = _Reader(config)
    model_type = str(config.get("model_type") or "unknown")
    hidden, num_heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    num_kv_heads = reader.number("num_key_value_heads", num_heads)
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:  # of Falcon
        num_kv_heads = 1
    head_dim = reader.number("head_dim", hidden // num_heads)
    latent, rope_dim = reader.number("kv_lora_rank", 0), reader.number("qk_rope_head_dim", 0)
    key_dim, value_dim = head_dim, head_dim
    if latent:
        key_dim, value_dim = reader.number("qk_nope_head_dim") + rope_dim, reader.number("v_head_dim")
        num_kv_heads = num_heads
        attention = _latent_attention(reader, hidden, num_heads, key_dim, value_dim, latent, rope_dim)
    else:
        attention = hidden * (num_heads * (key_dim + value_dim) + num_kv_heads * (key_dim + value_dim))
    num_layers = reader.number("num_hidden_layers")
    intermediate = reader.number("intermediate_size", 4 * hidden)
    matrices = 2 if model_type in UNGATED else 3
    experts = _Experts.read(reader, hidden, intermediate, num_layers)
    dense = (num_layers - experts.num_layers) * matrices * hidden * intermediate
    norms = (2 * num_layers + 1) * hidden
    common = num_layers * attention + dense + norms + experts.num_shared
    vocab_size = reader.number("vocab_size")
    is_tied = config.get("tie_word_embeddings", model_type in TIED_BY_DEFAULT)
    max_model_len = reader.number("max_position_embeddings", 0) or None
    positions = (max_model_len or 0) * hidden if model_type in LEARNED_POSITIONS else 0
    return ModelShape(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_embedding_parameters=hidden * vocab_size * (1 if is_tied else 2) + positions,
        num_layer_parameters=common + experts.num_routed,
        num_active_layer_parameters=common + experts.num_active,
        num_experts=experts.num_experts,
        num_experts_per_token=experts.num_per_token,
        num_expert_parameters=experts.num_routed,
        latent_dim=latent + rope_dim if latent else 0,
        window=reader.number("sliding_window", 0) or None,
        num_window_layers=_num_window_layers(config, reader, model_type, num_layers),
    )


def _num_window_layers(config: Mapping[str, Any], reader: _Reader, model_type: str, num_layers: int) -> int:
    """How many layers attend to a sliding window only. Older configurations do not list the kind of each layer."""
    if not reader.number("sliding_window", 0) or config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    period = reader.number("sliding_window_pattern", LAYERS_PER_FULL_ATTENTION.get(model_type, 0))
    if period:
        return num_layers - num_layers // period
    if config.get("use_sliding_window") is True:  # of Qwen: the first layers attend to everything
        return max(0, num_layers - reader.number("max_window_layers", 0))
    return num_layers


class _Reader:
    """Finds numbers in a configuration, by the names that its architecture has for them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def number(self, name: str, default: int | None = None) -> int:
        smallest = 1 if default is None else 0  # a number that is needed is used as a divisor, too
        for key in (name, *CONFIG_KEY_ALIASES.get(name, ())):
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value < 2**40:
                raise ConfigError(f"config.json: {key} = {value!r} is not a number of this size")
            return value
        if default is None:
            raise ConfigError(f"config.json has no {name}; it is needed to compute the size of the model")
        return default

    def numbers(self, name: str) -> frozenset[int]:
        """The numbers in a list of the configuration; none if it has no such list."""
        value = self._config.get(name)
        return frozenset(each for each in value if isinstance(each, int)) if isinstance(value, list) else frozenset()


class _Experts(Struct, frozen=True):
    """The parameters of a mixture of experts."""

    num_layers: int = 0
    num_experts: int = 0
    num_per_token: int = 0
    num_routed: int = 0  # parameters of all experts that are chosen by a router
    num_active: int = 0  # of these, for one token
    num_shared: int = 0  # of experts that every token uses, and of the routers

    @staticmethod
    def read(reader: _Reader, hidden: int, intermediate: int, num_layers: int) -> _Experts:
        num_experts = reader.number("num_experts", 0)
        if not num_experts:
            return _Experts()
        num_per_token = reader.number("num_experts_per_tok")
        # DeepSeek's first layers have no experts. Qwen's have some in every n-th layer that is not listed as dense.
        num_dense = reader.number("first_k_dense_replace", 0)
        step, without = max(1, reader.number("decoder_sparse_step", 1)), reader.numbers("mlp_only_layers")
        num_dense += sum((layer + 1) % step != 0 or layer in without for layer in range(num_dense, num_layers))
        one = 3 * hidden * reader.number("moe_intermediate_size", intermediate)
        shared = 3 * hidden * reader.number("shared_expert_intermediate_size", 0)
        shared += one * reader.number("n_shared_experts", 0)
        layers = num_layers - num_dense
        return _Experts(
            num_layers=layers,
            num_experts=num_experts,
            num_per_token=num_per_token,
            num_routed=layers * num_experts * one,
            num_active=layers * num_per_token * one,
            num_shared=layers * (shared + hidden * num_experts),
        )


def _latent_attention(
    reader: _Reader, hidden: int, num_heads: int, key_dim: int, value_dim: int, latent: int, rope_dim: int
) -> int:
    """Parameters of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), of one layer."""
    query_rank = reader.number("q_lora_rank", 0)
    queries = hidden * query_rank + query_rank * num_heads * key_dim if query_rank else hidden * num_heads * key_dim
    keys_and_values = hidden * (latent + rope_dim) + latent * num_heads * (key_dim - rope_dim + value_dim)
    return queries + keys_and_values + num_heads * value_dim * hidden
