"""Draft with multi-token prediction: extra layers of a checkpoint after the model's last layer.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2. Such a layer reads the model's last hidden states and
the embedding of the token that follows, and is a decoder layer of the model's own kind. Embedding and output head are
the model's. transformers knows where each family's checkpoints have it, and builds it (`MtpModel`).
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from servekit.errors import ConfigError
from workers.attention.interface import PagedStep
from workers.layers.layer_replacement import replace_linears
from workers.loading.attention_recording import STEP_KEYWORD, record_layer
from workers.loading.checkpoint import find_weights, quantization_config
from workers.loading.model_config import architecture_of
from workers.loading.model_manager import LoadedModel
from workers.loading.refusals import in_one_line

_NUMBERED = re.compile(r"layers\\?\.\d")  # a pattern for the layer of this number


class MtpHead:
    """The first MTP layer of a model. It continues itself where more drafts are wanted than the model has layers."""

    layers: tuple[int, ...] = ()  # of the model, whose inputs are read: none, but what its output head reads

    def __init__(self, mtp: Any) -> None:
        """`mtp` is a MtpModel of one layer with the embedding and the output head of the model."""
        self._mtp = mtp
        self.hidden_size: int = mtp.config.hidden_size
        weight = mtp.layers[0].eh_proj.weight
        states = torch.zeros(1, self.hidden_size, device=weight.device, dtype=weight.dtype)
        token = torch.zeros(1, dtype=torch.int64, device=weight.device)
        call = record_layer(mtp.config, lambda step: self.predict(self.forward(token, states, token, step)))
        self.kv_shape, self.attention_params = call.shape, call.params

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Return the model's hidden states [num_tokens, hidden_size] as `forward` takes them: unchanged."""
        return hidden_states

    def forward(self, token_ids: Tensor, hidden_states: Tensor, position_ids: Tensor, paged: PagedStep) -> Tensor:
        """Return what stands for the last hidden states of the next positions, as Eagle3Head.forward does."""
        mtp, positions = self._mtp, position_ids[None]
        embedded = mtp.embed_tokens(token_ids[None])
        output = mtp.layers[0](
            embedded,
            hidden_states[None],
            position_embeddings=mtp.rotary_emb(embedded, position_ids=positions),
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
            **{STEP_KEYWORD: paged},
        )
        normed: Tensor = mtp.shared_post_norm(output) if mtp.use_shared_post_norm else output
        return normed[0]

    def predict(self, hidden_states: Tensor) -> Tensor:
        """Return the most probable token [num_rows] after each row of what `forward` returned."""
        token_ids: Tensor = self._mtp._project_to_logits(hidden_states).argmax(dim=-1)
        return token_ids


def load_mtp_head(path: Path, loaded: LoadedModel) -> MtpHead:
    """Return the MTP layer of the checkpoint in `path`, from which the model was loaded.

    Raises ConfigError for a checkpoint that has none, and for those that servekit does not read.
    """
    architecture = architecture_of(loaded.model.config)
    if not getattr(loaded.model.config.get_text_config(), "num_mtp_layers", None):
        raise ConfigError(
            f"--speculative mtp: {architecture} in {path} has no MTP layers that transformers knows (num_mtp_layers or "
            "num_nextn_predict_layers in config.json); choose another drafter"
        )
    if quantization_config(path) is not None:
        raise ConfigError(
            f"--speculative mtp: the weights in {path} are quantized, and servekit reads MTP layers of unquantized "
            "checkpoints only; choose another drafter"
        )
    find_weights(path)  # refuses all but safetensors of this directory
    try:
        mtp = MtpModel.from_pretrained(_without_memory(path, loaded))
        if mtp.rotary_emb is None or mtp.has_per_layer_rope:
            raise ValueError("its MTP layer has no rotary positions, or those of several kinds of layers")
        mtp.tie_with_main_model(loaded.model)
        layer = mtp.layers[0]
        # All else is the model's own, and is on its device: embedding, output head, rotary positions.
        for own in (layer, *([mtp.shared_post_norm] if mtp.use_shared_post_norm else [])):
            own.requires_grad_(False).eval().to(device=loaded.device, dtype=loaded.dtype)
        head = MtpHead(mtp)
        replace_linears(layer, loaded.device, loaded.dtype)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises various errors for a checkpoint that is not valid
        raise ConfigError(
            f"--speculative mtp: the MTP layer of {architecture} in {path} cannot be read: {in_one_line(error)}; "
            "choose another drafter"
        ) from None
    return head


def _without_memory(path: Path, loaded: LoadedModel) -> PreTrainedModel:
    """Return the model with the layers of transformers, of which the MTP layer has the classes.

    MtpModel takes the tensors that the model itself ignores. transformers knows the number of the first layer after
    the last one only for models that their makers have published.
    """
    config = copy.deepcopy(loaded.model.config)
    config.get_text_config().num_mtp_layers = 1
    config.dtype = config.get_text_config().dtype = loaded.dtype
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", trust_remote_code=False
        )
    model.config.name_or_path = str(path)
    ignored = [pattern for pattern in model._keys_to_ignore_on_load_unexpected or [] if not _NUMBERED.search(pattern)]
    model._keys_to_ignore_on_load_unexpected = [
        rf"\blayers\.{config.get_text_config().num_hidden_layers}\.",
        *ignored,
    ]
    return model
