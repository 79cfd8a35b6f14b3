"""Small random EAGLE-3 heads and MTP layers in the layouts of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from servekit.protocol.messages import LoadModel
from servekit.protocol.speculative_config import SpeculativeConfig
from tests.support.load_settings import load_settings
from workers.loading.model_manager import LoadedModel

MAX_DRAFTS = 4
EAGLE_LAYERS = (0, 1, 2)  # of the model, whose inputs a head reads
MTP_MODELS: dict[str, dict[str, object]] = {  # by model type, beside the sizes that all have
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def settings_with_head(loaded: LoadedModel, method: str, path: str = "") -> LoadModel:
    """Return the settings of InProcessEngine with `--speculative METHOD:PATH`."""
    speculative = SpeculativeConfig(method, path, MAX_DRAFTS)
    return load_settings(loaded.model.name_or_path, dtype="auto", speculative=speculative)


def make_eagle3_head(
    directory: Path,
    target: Any,
    *,
    layout: str = "midlayer",
    hidden_size: int | None = None,
    draft_vocab_size: int | None = None,
    norm_before_residual: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Write a head for a model of the configuration `target`, and return its tensors by their names in "midlayer".

    `layout` is that of EAGLE's authors ("midlayer") or that of vLLM's speculators ("layers.0"). Without `hidden_size`
    it has the model's, and uses the model's embedding. Without `draft_vocab_size` it drafts all tokens. It has an
    output head of its own.
    """
    torch.manual_seed(seed)
    size, inner, num_heads, num_kv_heads, head_dim = hidden_size or target.hidden_size, 64, 4, 2, 16
    num_tokens = draft_vocab_size or target.vocab_size
    shapes = {
        "fc.weight": (size, len(EAGLE_LAYERS) * target.hidden_size),
        "midlayer.self_attn.q_proj.weight": (num_heads * head_dim, 2 * size),
        "midlayer.self_attn.k_proj.weight": (num_kv_heads * head_dim, 2 * size),
        "midlayer.self_attn.v_proj.weight": (num_kv_heads * head_dim, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, num_heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "lm_head.weight": (num_tokens, size),
    }
    if hidden_size is not None:
        shapes["embed_tokens.weight"] = (target.vocab_size, size)
    tensors = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = 1 + 0.2 * torch.randn(size)
    if draft_vocab_size is not None:
        chosen = torch.randperm(target.vocab_size)[:draft_vocab_size].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    layer = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "vocab_size": target.vocab_size,
    }
    config: dict[str, Any] = {"draft_vocab_size": num_tokens, "norm_before_residual": norm_before_residual}
    directory.mkdir(parents=True, exist_ok=True)
    if layout == "midlayer":
        ids = [number - 1 for number in EAGLE_LAYERS]  # this layout numbers the outputs of layers
        eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        config |= {**layer, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}
        written = tensors
    else:
        config |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
        config["eagle_aux_hidden_state_layer_ids"] = list(EAGLE_LAYERS)
        written = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, directory / "model.safetensors")
    return tensors


def make_medusa_heads(directory: Path, target: Any, *, scale: float = 0.3, seed: int = 3) -> None:
    """Write Medusa heads of one residual block each for a model of the configuration `target`, whose matrix they use.

    With `scale` 0 they change no hidden state: each of them guesses the token that the model has just chosen.
    """
    torch.manual_seed(seed)
    size = target.hidden_size
    tensors = {f"{head}.0.linear.weight": torch.randn(size, size) * scale for head in range(MAX_DRAFTS)}
    tensors |= {f"{head}.0.linear.bias": torch.randn(size) * scale for head in range(MAX_DRAFTS)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "medusa_lm_head.safetensors")


def add_mtp_layer(directory: Path, seed: int = 0) -> dict[str, Tensor]:
    """Add a MTP layer to the checkpoint of a mixture of experts, and return its tensors by their names there.

    It is the model's last layer with other numbers, and what DeepSeek-V3 and GLM-4-MoE put around it.
    """
    torch.manual_seed(seed)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((directory / "config.json").read_text())
    last, size, vocab_size = config["num_hidden_layers"] - 1, config["hidden_size"], config["vocab_size"]
    added: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if f"layers.{last}." in name:
            other = torch.randn_like(tensor) / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor + 0.1
            added[name.replace(f"layers.{last}.", f"layers.{last + 1}.")] = other
    prefix = f"model.layers.{last + 1}."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{prefix}{norm}.weight"] = 1 + 0.2 * torch.randn(size)
    added[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size) / (2 * size) ** 0.5
    # Copies of the model's own, which are not read.
    added[f"{prefix}embed_tokens.weight"] = torch.zeros(vocab_size, size)
    added[f"{prefix}shared_head.head.weight"] = torch.zeros(vocab_size, size)
    save_file({**tensors, **added}, file, metadata={"format": "pt"})
    return added
