"""Claims about the pairs that AWQ scales: they are those of the architecture, and scaling them changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from workers.compression.decoder_layers import DecoderLayers, LayerCall, hidden_states
from workers.compression.input_groups import record_groups
from workers.layers.linear import is_plain_linear

# By the layers that share an input: what computes the input.
PAIRS: dict[str, dict[str, str]] = {
    "llama": {
        "q_proj k_proj v_proj": "input_layernorm",
        "gate_proj up_proj": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
    "gemma2": {
        "q_proj k_proj v_proj": "input_layernorm",
        "gate_proj up_proj": "pre_feedforward_layernorm",
        "down_proj": "up_proj",
    },
    "phi3": {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"},
    # Parallel: attention and MLP have one norm. Its MLP has an activation between its matrices.
    "phi": {"q_proj k_proj v_proj fc1": "input_layernorm", "dense": "v_proj"},
    "gpt_neox": {"query_key_value": "input_layernorm", "dense_h_to_4h": "post_attention_layernorm"},
    # Norms come after the matrices, so the inputs are the residual stream.
    "olmo2": {"down_proj": "up_proj"},
    # ReLU passes a positive scale on, so the matrices of its MLP are a pair.
    "opt": {
        "q_proj k_proj v_proj": "self_attn_layer_norm",
        "out_proj": "v_proj",
        "fc1": "final_layer_norm",
        "fc2": "fc1",
    },
    "mixtral": {"q_proj k_proj v_proj": "input_layernorm"},
}


def quick_or_long(architecture: str) -> Any:
    """Return the parameter of a test, which is long for architectures that are much like another one."""
    return pytest.param(architecture, marks=[] if architecture in PAIRS else pytest.mark.long)


def first_layer(architecture: str, directory: Path) -> tuple[nn.Module, LayerCall]:
    torch.manual_seed(0)
    model = make_model(directory, *ARCHITECTURES[architecture])
    layers = DecoderLayers(model, [torch.randint(3, VOCAB_SIZE, (1, 30))], architecture)
    return layers.in_float32(0), next(layers.calls(0))


def linears_of(layer: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in layer.named_modules() if is_plain_linear(module)}


def last(name: str) -> str:
    return name.rpartition(".")[2]


@pytest.mark.parametrize("architecture", PAIRS)
def test_pairs_are_those_of_the_architecture(architecture: str, tmp_path: Path) -> None:
    with torch.no_grad():
        layer, call = first_layer(architecture, tmp_path)
        recording = record_groups(layer, call, linears_of(layer))
        names = {id(module): name for name, module in layer.named_modules()}
        found = {}
        for group in recording.groups:
            source = recording.source_of(group, layer, call)
            if source is not None:
                found[" ".join(map(last, group.linears))] = last(names[id(source.module)])
    assert found == PAIRS[architecture]


# Its matrices are in a class of their own, which is neither quantized nor scaled.
NO_LINEAR_LAYERS = {"gpt2"}


@pytest.mark.parametrize(
    "architecture", [quick_or_long(name) for name in ARCHITECTURES if name not in NO_LINEAR_LAYERS]
)
def test_scaling_all_pairs_leaves_the_output_as_it_is(architecture: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    with torch.no_grad():
        layer, call = first_layer(architecture, tmp_path)
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype).float()  # as files have them
        before = hidden_states(call.run(layer))
        recording = record_groups(layer, call, linears_of(layer))
        sources = [(group, recording.source_of(group, layer, call)) for group in recording.groups]
        assert any(source is not None for _, source in sources)
        num_scaled = 0
        for group, source in sources:
            scales = torch.rand(group.x.shape[-1]) * 3 + 0.3
            applied = None if source is None else source.divide(scales, dtype)
            if applied is None:
                continue
            num_scaled += 1
            torch.testing.assert_close(applied, scales, rtol=0.1, atol=0)
            for linear in group.linears.values():
                linear.weight.data = linear.weight.data * applied
        assert num_scaled == sum(source is not None for _, source in sources)
        after = hidden_states(call.run(layer))
    # Only biases are rounded to the type of the files without being made up for.
    has_biases = any(name.endswith("bias") for name, _ in layer.named_parameters())
    assert float((after - before).norm() / before.norm()) < (1e-2 if has_biases else 1e-5)


def test_a_norm_whose_output_goes_elsewhere_too_is_not_divided(tmp_path: Path) -> None:
    with torch.no_grad():
        layer, call = first_layer("llama", tmp_path)
        linears = linears_of(layer)
        del linears["self_attn.k_proj"]  # which is not quantized, so its input must stay as it is
        recording = record_groups(layer, call, linears)
        group = next(group for group in recording.groups if "self_attn.q_proj" in group.linears)
        assert recording.source_of(group, layer, call) is None


def test_a_linear_layer_that_is_not_called_is_in_no_group(tmp_path: Path) -> None:
    with torch.no_grad():
        layer, call = first_layer("llama", tmp_path)
        layer.add_module("idle", nn.Linear(48, 48))
        recording = record_groups(layer, call, linears_of(layer))
    assert sorted(name for group in recording.groups for name in group.linears) == sorted(
        name for name in linears_of(layer) if name != "idle"
    )
