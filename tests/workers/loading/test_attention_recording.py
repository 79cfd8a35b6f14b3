"""Claims about architectures: which are refused and in which words, and that no step is kept after its forward pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import ARCHITECTURES, REFUSED, make_model

LAYERS = {
    "big_bird": "2 of its 2 layers (BigBirdLayer) do not call AttentionInterface",
    "falcon_alibi": "its configuration has `alibi`, and these positions are rounded in a way that pages do not "
    "reproduce; Falcon models with rotary positions (falcon-7b, falcon-40b, falcon-11B) are served",
    "mamba": "2 of its 2 layers (MambaBlock) do not call AttentionInterface",
}
PYTHON = re.compile(r"Error\b|object has no|argument|_recording|keyword|NoneType")


@pytest.mark.parametrize("name", REFUSED)
def test_architecture_is_refused_by_its_name_and_what_its_layers_lack(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, *REFUSED[name])
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path)
    message = refusal.value.message
    assert message.startswith(f"architecture {type(model).__name__} cannot be served: {LAYERS[name]}. servekit serves ")
    assert not PYTHON.search(message)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("t5", "only an encoder with a decoder, and servekit serves decoders alone"),
        ("vit", "no model of text alone"),
    ],
)
def test_model_without_a_text_decoder_is_refused_by_its_type(model_type: str, kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type)
    config.architectures = ["SomeModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path)
    assert refusal.value.message.startswith(
        f"architecture SomeModel cannot be served: for model type {model_type} transformers has {kind}. servekit "
        "serves "
    )


def test_model_that_transformers_cannot_run_is_not_taken_for_another_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", fail)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaAttention.forward", fail)
    with pytest.raises(
        ConfigError, match=r"cannot run the LlamaForCausalLM that config.json describes: .*mat1 and mat2"
    ):
        load(tmp_path)


def test_model_whose_layers_drop_keywords_keeps_no_step(tmp_path: Path) -> None:
    """A step refers to the KV cache: keeping one keeps the memory of a runner that is no longer used."""
    make_model(tmp_path, *ARCHITECTURES["nemotron"])
    loaded = load(tmp_path)
    engine = InProcessEngine(loaded)
    engine.add([3, 4, 5], max_tokens=2)
    engine.run()
    (forget,) = loaded.model._forward_hooks.values()
    assert forget.__self__._given == {}  # type: ignore[attr-defined]
