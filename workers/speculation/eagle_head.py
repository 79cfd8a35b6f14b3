"""Read EAGLE-3 heads: one decoder layer that continues a model's own hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. A head
reads hidden states of three layers of the model, and the embedding of the token that follows. What it returns stands
for the hidden states of the next position, so it can continue itself.

Two layouts of checkpoints are read. In that of the authors' repository and SGLang, config.json is flat and the layer is
called `midlayer`. In that of vLLM's speculators, the layer is `layers.0` and described in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from servekit.errors import ConfigError
from workers.attention.interface import AttentionParams, PagedStep
from workers.kv_cache.pages import LayerShape
from workers.layers.layer_replacement import replace_linears
from workers.loading.attention_recording import record_layer
from workers.loading.checkpoint import find_weights
from workers.loading.model_manager import LoadedModel
from workers.loading.refusals import in_one_line
from workers.loading.tensor_files import TensorFiles

PREFIXES = ("model.", "midlayer.", "layers.0.")  # that checkpoints put before the names of this module's parameters
# Tensors in checkpoints that are not used to make drafts: the inverse of d2t, and copies of the model's last layers.
UNUSED = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight", "self_attn.rotary_emb.inv_freq"}
SHARED = {"embed_tokens.weight", "lm_head.weight"}  # the model's are used if the head has none
INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What config.json says of a head."""

    layer: LlamaConfig
    draft_vocab_size: int | None  # None: as many tokens as lm_head has rows
    layers: tuple[int, ...]  # of the model, whose inputs are read
    norm_before_residual: bool  # whether the layer's residual is the normalised input


class Eagle3Head(nn.Module):
    """A head. Its parameters have the names that checkpoints have, without PREFIXES."""

    def __init__(self, config: Eagle3Config, num_inputs: int, has_bias: bool) -> None:
        """`num_inputs` are the hidden states that `fc` reads for a token; `has_bias` says whether `fc` has a bias."""
        super().__init__()
        layer = config.layer
        size = layer.hidden_size
        self.fc = nn.Linear(num_inputs, size, bias=has_bias)
        self.input_layernorm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.self_attn: Any = LlamaAttention(layer, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, num_outputs, bias=layer.attention_bias))
        self.post_attention_layernorm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.mlp = LlamaMLP(layer)
        self.norm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.layers = config.layers
        self.hidden_size = size
        self._norm_before_residual = config.norm_before_residual
        # Set by load_eagle3_head.
        self.kv_shape: LayerShape
        self.attention_params: AttentionParams
        self.embed_tokens: Any = None
        self.lm_head: Any = None
        self.rotary_emb: Any = None
        self.target_ids: Tensor | None
        self.register_buffer("target_ids", None)  # [draft_vocab_size]: the model's token of each row of lm_head

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size] for the model's hidden states [num_tokens, num_inputs]."""
        fused: Tensor = self.fc(hidden_states)
        return fused

    def forward(self, token_ids: Tensor, hidden_states: Tensor, position_ids: Tensor, paged: PagedStep) -> Tensor:
        """Return what stands for the hidden states of the next positions [num_tokens, hidden_size].

        token_ids [num_tokens] are the tokens that follow those of `hidden_states` [num_tokens, hidden_size]. The
        hidden states are at `position_ids` [num_tokens], and so are the keys and values in the pages.
        """
        normed = self.hidden_norm(hidden_states)
        residual = normed if self._norm_before_residual else hidden_states
        embedded = self.input_layernorm(self.embed_tokens(token_ids))
        x = torch.cat([embedded, normed], dim=-1)[None]
        attended, _ = self.self_attn(x, self.rotary_emb(x, position_ids[None]), None, paged=paged)
        x = residual + attended[0]
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output

    def predict(self, hidden_states: Tensor) -> Tensor:
        """Return the most probable token [num_rows] after each row of what `forward` returned."""
        token_ids: Tensor = self.lm_head(self.norm(hidden_states)).argmax(dim=-1)
        return token_ids if self.target_ids is None else self.target_ids[token_ids]


def load_eagle3_head(path: Path, loaded: LoadedModel) -> Eagle3Head:
    """Return the head in `path`, ready to run alongside the model. Raises ConfigError for what does not fit."""
    config = loaded.model.config.get_text_config()
    try:
        files = TensorFiles(find_weights(path))
        names = _names(files, path)
        head_config = read_eagle3_config(path, config.num_hidden_layers)
        head = _make(head_config, files, names, path, config.hidden_size)
        _check_complete(head, files, names, path)
        _read(head, files, names, loaded)
        head.target_ids = _target_ids(head_config, files, names, path, config.vocab_size)
    except SafetensorError as error:
        raise ConfigError(f"the weights of the EAGLE-3 head in {path} are damaged: {error}") from None
    head.requires_grad_(False).eval().to(loaded.device)
    replace_linears(head, loaded.device, loaded.dtype)
    if head.embed_tokens is None:
        head.embed_tokens = _shared(loaded.model.get_input_embeddings(), "embed_tokens", head, config, path)
    if head.lm_head is None:
        head.lm_head = _shared(loaded.model.get_output_embeddings(), "lm_head", head, config, path)
    with _layer_errors_named(path):
        _try(head, loaded)
    return head


def _try(head: Eagle3Head, loaded: LoadedModel) -> None:
    """Compute one token, so that a head that cannot be computed is refused now, and record how the head attends."""
    head.rotary_emb = LlamaRotaryEmbedding(head.self_attn.config).to(loaded.device)
    states = torch.zeros(1, head.hidden_size, dtype=loaded.dtype, device=loaded.device)
    token = torch.zeros(1, dtype=torch.int64, device=loaded.device)
    call = record_layer(head.self_attn.config, lambda step: head.predict(head.forward(token, states, token, step)))
    head.kv_shape, head.attention_params = call.shape, call.params


@contextmanager
def _layer_errors_named(path: Path) -> Iterator[None]:
    """Turn the various errors of transformers and torch for an invalid configuration into a ConfigError."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{path / 'config.json'} describes no layer that can be computed: {in_one_line(error)}"
        ) from None


def read_eagle3_config(path: Path, num_layers: int) -> Eagle3Config:
    """Read config.json of a head for a model of `num_layers` layers. Raises ConfigError."""
    file = path / "config.json"
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no JSON object")
    described = content.get("transformer_layer_config", content)
    if not isinstance(described, dict):
        raise ConfigError(f"{file}: transformer_layer_config is no JSON object")
    if described.get("num_hidden_layers", 1) != 1:
        raise ConfigError(
            f"{file} describes {str(described['num_hidden_layers'])[:20]} decoder layers; servekit reads EAGLE-3 heads "
            "of one layer"
        )
    draft_vocab_size = content.get("draft_vocab_size")
    if draft_vocab_size is not None and not _is_number(draft_vocab_size, 1, 2**31 - 1):
        raise ConfigError(f"{file}: draft_vocab_size is {str(draft_vocab_size)[:40]}, which is no number of tokens")
    with _layer_errors_named(path):
        layer = LlamaConfig.from_dict({**described, "num_hidden_layers": 1})
        _check_heads(layer)
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        layers=_layers(content, num_layers, file),
        norm_before_residual=bool(content.get("norm_before_residual", False)),
    )


def _check_heads(layer: LlamaConfig) -> None:
    num_heads, num_kv_heads, head_dim = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    for size in (layer.hidden_size, layer.intermediate_size, num_heads, num_kv_heads, head_dim):
        if not _is_number(size, 1, 2**24):
            raise ValueError(f"a size is {str(size)[:40]}, and must be a positive number")
    assert num_kv_heads is not None and head_dim is not None  # transformers has filled them in
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(f"{num_heads} heads of {head_dim} numbers cannot share {num_kv_heads} key-value heads")


def _layers(content: dict[str, Any], num_layers: int, file: Path) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads.

    `eagle_config` numbers layers by their outputs, as SGLang does, and `eagle_aux_hidden_state_layer_ids` by their
    inputs, as vLLM does. Both use the same layers if a checkpoint names none.
    """
    nested = content.get("eagle_config")
    if isinstance(nested, dict) and nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{file}: use_aux_hidden_state is false; servekit reads heads that use several layers")
    of_outputs = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    of_inputs = content.get("eagle_aux_hidden_state_layer_ids")
    if of_outputs is None and of_inputs is None:
        if num_layers < 4:  # three different layers are needed
            raise ConfigError(
                f"{file} names no eagle_aux_hidden_state_layer_ids, and the model has {num_layers} layers"
            )
        return 2, num_layers // 2, num_layers - 3
    ids, shift = (of_inputs, 0) if of_outputs is None else (of_outputs, 1)
    known = ids if isinstance(ids, list) and len(ids) <= num_layers + 1 else []
    if not known or not all(_is_number(layer, -shift, num_layers - shift) for layer in known):
        raise ConfigError(
            f"{file}: eagle_aux_hidden_state_layer_ids is {str(ids)[:60]}, and the model has {num_layers} layers; this "
            "head belongs to another model"
        )
    return tuple(layer + shift for layer in known)


def _is_number(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _names(files: TensorFiles, path: Path) -> dict[str, str]:
    """Return the name in the files of each tensor, by its name without PREFIXES."""
    names: dict[str, str] = {}
    for name in files.names():
        own = name
        for prefix in PREFIXES:
            own = own.removeprefix(prefix)
        if own in names:
            raise ConfigError(f"{path} has two tensors for {own[:100]}: {names[own][:100]} and {name[:100]}")
        names[own] = name
    if "fc.weight" not in names or "hidden_norm.weight" not in names:
        kind = "an EAGLE-1 or EAGLE-2 head" if "fc.weight" in names else "no EAGLE-3 head"
        raise ConfigError(
            f"{path} holds {kind}: an EAGLE-3 head has the tensors fc.weight and midlayer.hidden_norm.weight; give "
            "--speculative eagle the directory of one"
        )
    return names


def _make(config: Eagle3Config, files: TensorFiles, names: dict[str, str], path: Path, hidden_size: int) -> Eagle3Head:
    """Return a head without memory. Raises ConfigError if its hidden states are not those of the model."""
    num_inputs = hidden_size * len(config.layers)
    shape = files.lazy(names["fc.weight"]).get_shape()
    if shape != [config.layer.hidden_size, num_inputs]:
        raise ConfigError(
            f"{path}: fc.weight is {_shape(shape)}, and {len(config.layers)} hidden states of the model, of "
            f"{hidden_size} numbers each, need {_shape([config.layer.hidden_size, num_inputs])}; this head belongs to "
            "another model"
        )
    with _layer_errors_named(path), torch.device("meta"):
        return Eagle3Head(config, num_inputs, "fc.bias" in names)


def _check_complete(head: Eagle3Head, files: TensorFiles, names: dict[str, str], path: Path) -> None:
    """Raise ConfigError if a parameter is missing or of another shape, or if the use of a tensor is not known.

    A tensor without a known use changes what the head computes, and without it the drafts would be wrong.
    """
    expected = {name: list(parameter.shape) for name, parameter in head.named_parameters()}
    missing = sorted(set(expected) - set(names))
    if missing:
        raise ConfigError(
            f"the EAGLE-3 head in {path} lacks {len(missing)} tensors, among them {', '.join(missing[:3])}"
        )
    unknown = sorted(set(names) - set(expected) - UNUSED - SHARED - {"d2t"})
    if unknown:
        raise ConfigError(
            f"the EAGLE-3 head in {path} has {len(unknown)} tensors that servekit does not know, among them "
            f"{', '.join(name[:100] for name in unknown[:3])}; it is of a variant that is not supported"
        )
    for name, shape in expected.items():
        found = files.lazy(names[name]).get_shape()
        if found != shape:
            raise ConfigError(f"{path}: {name} is {_shape(found)}, and config.json describes {_shape(shape)}")


def _read(head: Eagle3Head, files: TensorFiles, names: dict[str, str], loaded: LoadedModel) -> None:
    """Fill the head, and give it the embedding and the output head that the files have."""

    def read(name: str) -> Tensor:
        files.lazy(names[name])  # refuses codes
        return files.tensor(names[name]).to(loaded.dtype, copy=True)  # without a copy, it would stay part of the file

    parameters = {name: read(name) for name, _ in head.named_parameters()}
    head.load_state_dict(parameters, strict=False, assign=True)
    for name in SHARED & set(names):
        weight = read(name)
        if weight.ndim != 2 or weight.shape[1] != head.hidden_size:
            raise ConfigError(
                f"{name} of the EAGLE-3 head is {_shape(list(weight.shape))}, and its hidden size is {head.hidden_size}"
            )
        if name == "lm_head.weight":
            head.lm_head = nn.Linear(head.hidden_size, len(weight), bias=False, device="meta", dtype=loaded.dtype)
            head.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        else:
            head.embed_tokens = nn.Embedding(len(weight), weight.shape[1], _weight=weight)
    if head.embed_tokens is not None and head.embed_tokens.num_embeddings < loaded.info.vocab_size:
        raise ConfigError(
            f"embed_tokens.weight of the EAGLE-3 head has {head.embed_tokens.num_embeddings} rows, and the model has "
            f"{loaded.info.vocab_size} tokens; this head belongs to another model"
        )


def _shared(module: Any, name: str, head: Eagle3Head, config: Any, path: Path) -> Any:
    """Return the model's module to use for one that the head does not have."""
    if head.hidden_size != config.hidden_size:
        raise ConfigError(
            f"the EAGLE-3 head in {path} has no {name}.weight, and the model's cannot be used: its hidden size is "
            f"{config.hidden_size}, the head's {head.hidden_size}"
        )
    return module


def _target_ids(
    config: Eagle3Config, files: TensorFiles, names: dict[str, str], path: Path, vocab_size: int
) -> Tensor | None:
    """Return the model's token for each row of lm_head; None if they have the same numbers.

    `d2t` holds the difference of both for each row.
    """
    has_own = "lm_head.weight" in names
    num_rows = files.lazy(names["lm_head.weight"]).get_shape()[0] if has_own else vocab_size
    if config.draft_vocab_size not in (None, num_rows):
        raise ConfigError(
            f"{path}: draft_vocab_size is {config.draft_vocab_size}, and lm_head has {num_rows} rows; the files do not "
            "belong together"
        )
    if "d2t" not in names:
        if num_rows != vocab_size:
            raise ConfigError(
                f"the EAGLE-3 head in {path} has {num_rows} tokens and the model {vocab_size}, and no tensor d2t says "
                "which are which"
            )
        return None
    differences = files.tensor(names["d2t"])
    if differences.dtype not in INTEGERS or list(differences.shape) != [num_rows]:
        raise ConfigError(
            f"{path}: d2t is {_shape(list(differences.shape))} of {str(differences.dtype).removeprefix('torch.')}, and "
            f"must be {num_rows} integers, one for each row of lm_head"
        )
    target_ids = differences.long() + torch.arange(num_rows)
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size:
        raise ConfigError(
            f"{path}: d2t names tokens from {int(target_ids.min())} to {int(target_ids.max())}, and the model has "
            f"{vocab_size}; this head belongs to another model"
        )
    return target_ids


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
