"""Claims about architectures: which are refused and in which words, and that no step is kept after its forward pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import ARCHITECTURES, REFUSED, make_model
from workers.loading.model_manager import LoadedModel

LAYERS = {
    "big_bird": "2 of its 2 layers (BigBirdLayer) do not call AttentionInterface",
    "falcon_alibi": "its configuration has `alibi`, and these positions are rounded in a way that pages do not "
    "reproduce",
    "mamba": "2 of its 2 layers (MambaBlock) do not call AttentionInterface",
}
PYTHON = re.compile(r"Error\b|object has no|argument|_recording|keyword|NoneType")


@pytest.mark.parametrize("name", REFUSED)
def test_architecture_is_refused_by_its_name_and_what_its_layers_lack(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, *REFUSED[name])
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path)
    message = refusal.value.message
    assert message.startswith(f"architecture {type(model).__name__} cannot be served: {LAYERS[name]}; ")
    assert re.search("; (servekit serves|Falcon models)", message), "it says what to do"
    assert not PYTHON.search(message)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "model type t5 is an encoder with a decoder, and servekit serves decoders alone; servekit serves "),
        ("whisper", "model type whisper is an encoder with a decoder, and servekit serves decoders alone; servekit "),
        ("kosmos-2.5", "it counts positions from its padding token on, and not from 0; servekit serves "),
        ("chameleon", "transformers does not keep its language part apart from the others; servekit serves "),
        ("vit", "transformers has no class that generates text for model type vit; choose "),
        (
            "bert",
            "`is_decoder` is false in its config.json, so that each token attends to those after it, too; it embeds ",
        ),
    ],
)
def test_model_without_a_text_decoder_is_refused_by_its_type(model_type: str, reason: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type)
    config.architectures = ["SomeModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path)
    assert refusal.value.message.startswith(f"architecture SomeModel cannot be served: {reason}")


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


def test_model_that_counts_positions_itself_is_refused(tmp_path: Path) -> None:
    """BartForCausalLM, a decoder alone, takes the position of a token from transformers' KV cache."""
    sizes = {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 64}
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 6}  # which names the decoder's sizes, too
    make_model(tmp_path, "bart", {**sizes, **encoder, "vocab_size": 128, "is_encoder_decoder": False})
    with pytest.raises(ConfigError, match="it counts positions by the KV cache of transformers"):
        load(tmp_path)


def test_a_head_that_returns_all_logits_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models do not know `logits_to_keep`."""
    make_model(tmp_path, *ARCHITECTURES["llama"])
    expected = _answer(load(tmp_path))
    original = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *a, logits_to_keep=0, **k: original(*a, **k))
    monkeypatch.setattr("workers.layers.layer_replacement.fuse_layers", lambda *_: None)
    assert _answer(load(tmp_path)) == expected


def _answer(loaded: LoadedModel) -> list[int]:
    engine = InProcessEngine(loaded)
    sequence = engine.add([3, 4, 5, 6, 7], max_tokens=6)
    engine.run()
    return sequence.output_token_ids


def test_padding_tokens_do_not_hide_other_positions_from_the_self_check(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", {**ARCHITECTURES["llama"][1], "pad_token_id": 0})
    assert 0 not in load(tmp_path).sample.token_ids
