"""Turn the hidden states of a text's tokens into its embedding, as the modules of sentence-transformers do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from servekit.errors import ConfigError
from workers.prediction.checkpoint_files import ModuleFiles, pooling_modes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": F.gelu,
    "Identity": lambda x: x,
    "ReLU": F.relu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The last hidden states of items that were computed together."""

    indices: list[int]  # of the items
    values: Tensor  # [num_items, num_tokens, hidden_size]
    lengths: list[int]  # in tokens; what is after an item's length is padding
    num_unpooled: list[int]  # first tokens of each item that pooling leaves out

    def mask(self) -> Tensor | None:
        """Return which tokens are pooled, [num_items, num_tokens] bool; None if all are."""
        num_tokens = self.values.shape[1]
        if not any(self.num_unpooled) and all(length == num_tokens for length in self.lengths):
            return None
        positions = torch.arange(num_tokens)
        starts, ends = torch.tensor(self.num_unpooled)[:, None], torch.tensor(self.lengths)[:, None]
        return ((positions >= starts) & (positions < ends)).to(self.values.device)


class Pooling(nn.Module):
    """The embeddings of texts, of the hidden states of their tokens. Sums are in float32."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        self.modes = pooling_modes(files.config)
        self.includes_prompt = files.config.get("include_prompt") is not False

    def forward(self, hidden: HiddenStates) -> Tensor:
        """Return the embeddings, [num_items, hidden_size * num_modes]."""
        values, mask = hidden.values, hidden.mask()
        return torch.cat([_pool(mode, values, mask, hidden) for mode in self.modes], dim=-1)


def _pool(mode: str, values: Tensor, mask: Tensor | None, hidden: HiddenStates) -> Tensor:
    if mode == "cls":
        return values[torch.arange(len(values)), hidden.num_unpooled]
    if mode == "lasttoken":
        return values[torch.arange(len(values)), [length - 1 for length in hidden.lengths]]
    if mode == "max":
        return (values if mask is None else values.masked_fill(~mask[..., None], -torch.inf)).amax(dim=1)
    weights = torch.ones(values.shape[:2], device=values.device) if mask is None else mask.float()
    if mode == "weightedmean":
        weights = weights * torch.arange(1, values.shape[1] + 1, device=values.device)
    # A batched product of a row with a matrix reads the hidden states once, and copies nothing.
    total = torch.bmm(weights[:, None], values.float())[:, 0]
    count = weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
    return (total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)).to(values.dtype)


class Dense(nn.Module):
    """A linear layer with an activation, after pooling."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        config = files.config
        if config.get("module_input_name", "sentence_embedding") != "sentence_embedding" or config.get("use_residual"):
            raise ConfigError(f"{files.folder}: a Dense module of tokens, or with a residual, is not supported")
        name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"{files.folder}: activation {name[:60]!r} is not known; known are {', '.join(ACTIVATIONS)}"
            )
        self.activation = ACTIVATIONS[name]
        weights = _weights(files.folder)
        if "linear.weight" not in weights:
            raise ConfigError(f"{files.folder / 'model.safetensors'} has no linear.weight")
        self.weight = nn.Parameter(weights["linear.weight"], requires_grad=False)
        bias = weights.get("linear.bias")
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.activation(F.linear(embeddings, self.weight, self.bias))


class LayerNorm(nn.Module):
    """A layer norm, after pooling."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        weights = _weights(files.folder)
        if "norm.weight" not in weights or "norm.bias" not in weights:
            raise ConfigError(f"{files.folder / 'model.safetensors'} has no norm.weight and norm.bias")
        self.weight = nn.Parameter(weights["norm.weight"], requires_grad=False)
        self.bias = nn.Parameter(weights["norm.bias"], requires_grad=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        return F.layer_norm(embeddings, self.weight.shape, self.weight, self.bias)


class EmbeddingHead(nn.Module):
    """Everything between the hidden states and the embeddings of a checkpoint."""

    def __init__(self, files: list[ModuleFiles]) -> None:
        """Raises ConfigError if pooling does not come first, and comes once."""
        super().__init__()
        kinds = [each.kind for each in files]
        if kinds[:1] != ["Pooling"] or kinds.count("Pooling") != 1:
            raise ConfigError(f"the modules after the transformer are {kinds}; one Pooling must come first")
        self.pooling = Pooling(files[0])
        # The last Normalize is applied after a cut to fewer dimensions, so that cut embeddings have length 1, too.
        self.normalizes = kinds[-1] == "Normalize"
        kept = files[1:-1] if self.normalizes else files[1:]
        self.layers = nn.ModuleList(_make_layer(each) for each in kept)

    def forward(self, hidden: HiddenStates) -> Tensor:
        """Return the embeddings before the last normalization, [num_items, dimensions]."""
        embeddings: Tensor = self.pooling(hidden)
        for layer in self.layers:
            embeddings = layer(embeddings)
        return embeddings

    def finish(self, embedding: Tensor, dimensions: int | None) -> Tensor:
        """Return an embedding with so many dimensions, normalized if the checkpoint normalizes."""
        cut = embedding[..., :dimensions].float()
        return F.normalize(cut, dim=-1) if self.normalizes else cut


class _Normalize(nn.Module):
    def forward(self, embeddings: Tensor) -> Tensor:
        return F.normalize(embeddings, dim=-1)


def _make_layer(files: ModuleFiles) -> nn.Module:
    match files.kind:
        case "Dense":
            return Dense(files)
        case "LayerNorm":
            return LayerNorm(files)
        case _:
            return _Normalize()


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder / 'model.safetensors'} cannot be read: {error}; no other format is loaded"
        ) from None
