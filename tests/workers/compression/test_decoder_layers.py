"""Claims about layers that run one after the other: they compute what the whole model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from servekit.errors import ConfigError
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from workers.compression.decoder_layers import DecoderLayers, hidden_states

# Of several kinds: masks by layer, sinks, experts, layers that return tuples or drop keyword arguments.
QUICK = {"llama", "gemma3", "gpt_oss", "mixtral", "opt", "stablelm"}


def make_samples() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (1, length)) for length in (20, 7)]


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in ARCHITECTURES],
)
def test_each_layer_gets_what_it_gets_in_the_whole_model(architecture: str, tmp_path: Path) -> None:
    model, samples = make_model(tmp_path, *ARCHITECTURES[architecture]), make_samples()
    inputs: dict[int, list[torch.Tensor]] = {}
    outputs: dict[int, list[torch.Tensor]] = {}
    with torch.no_grad():
        layers = DecoderLayers(model, samples, architecture)
        hooks = []
        for index in range(len(layers)):
            note = inputs.setdefault(index, [])
            hooks.append(
                layers.original(index).register_forward_pre_hook(
                    lambda _, arguments, options, note=note: note.append(
                        arguments[0] if arguments else options["hidden_states"]
                    ),
                    with_kwargs=True,
                )
            )
            done = outputs.setdefault(index, [])
            hooks.append(
                layers.original(index).register_forward_hook(
                    lambda _, __, output, done=done: done.append(hidden_states(output))
                )
            )
        for sample in samples:
            model(input_ids=sample, use_cache=False)
        for hook in hooks:
            hook.remove()
        for index in range(len(layers)):
            layer = layers.in_float32(index)
            calls = list(layers.calls(index))
            for call, expected, result in zip(calls, inputs[index], outputs[index], strict=True):
                found = call.arguments[0] if call.arguments else call.options["hidden_states"]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(hidden_states(call.run(layer)), result, rtol=1e-4, atol=1e-4)
            layers.compute(index, layer)


def test_hidden_states_are_float32_whatever_the_files_have(tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES["gemma3"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        layers = DecoderLayers(model, make_samples(), "gemma3")
        for index in range(len(layers)):
            for call in layers.calls(index):
                floats = [
                    value for value in (*call.arguments, *call.options.values()) if isinstance(value, torch.Tensor)
                ]
                assert {value.dtype for value in floats if value.is_floating_point()} == {torch.float32}
            layers.compute(index, layers.in_float32(index))
        weights = list(layers.original(0).parameters())
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert model.get_input_embeddings().weight.dtype is torch.bfloat16


def test_a_model_without_a_list_of_layers_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, *ARCHITECTURES["llama"])
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(ConfigError, match="no list of its 3 layers"):
        DecoderLayers(model, [], "LlamaForCausalLM")
