"""Each drafter with files of its own, for each architecture: answers are those of a runner without drafts.

tests/workers/speculation/test_equality.py claims the same for prompt lookup and for drafters that are made up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.speculative_config import SpeculativeConfig
from tests.support.draft_heads import EAGLE_LAYERS, MTP_MODELS, add_mtp_layer, make_eagle3_head, make_medusa_heads
from tests.support.inprocess import InProcessEngine, load
from tests.support.load_settings import load_settings
from tests.support.tiny_models import _LLAMA_LIKE, ARCHITECTURES, make_model
from tests.workers.speculation.test_equality import SIZES, Size, assert_alike, expected, play
from tests.workers.test_token_identity import prepared
from workers.loading.model_manager import LoadedModel
from workers.speculation.choose import load_drafter

MAX_DRAFTS = 4
SMALLER = {**ARCHITECTURES["llama"][1], "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 48}

# Returns what `--speculative` names, for a loaded model and an empty folder.
MakeDrafter = Callable[[LoadedModel, Path], SpeculativeConfig]


def smaller_model(loaded: LoadedModel, folder: Path) -> SpeculativeConfig:
    if loaded.model.name_or_path == str(DEMO_MODEL_PATH):
        return SpeculativeConfig("draft", "", MAX_DRAFTS)
    make_model(folder, "llama", {**SMALLER, "vocab_size": loaded.info.vocab_size}, seed=1)
    return SpeculativeConfig("draft", str(folder), MAX_DRAFTS)


def model_itself(loaded: LoadedModel, folder: Path) -> SpeculativeConfig:
    """The same weights: as a draft model, because not all of these small models can be rounded."""
    return SpeculativeConfig("draft", loaded.model.name_or_path, MAX_DRAFTS)


def rounded_model(loaded: LoadedModel, folder: Path) -> SpeculativeConfig:
    return SpeculativeConfig("self", "", MAX_DRAFTS, quantization="int8")


def medusa_heads(loaded: LoadedModel, folder: Path) -> SpeculativeConfig:
    if loaded.model.name_or_path == str(DEMO_MODEL_PATH):
        return SpeculativeConfig("medusa", "", MAX_DRAFTS)
    make_medusa_heads(folder, loaded.model.config.get_text_config())
    return SpeculativeConfig("medusa", str(folder), MAX_DRAFTS)


def eagle_head(loaded: LoadedModel, folder: Path) -> SpeculativeConfig:
    config = loaded.model.config.get_text_config()
    assert config.num_hidden_layers > max(EAGLE_LAYERS)
    make_eagle3_head(folder, config)
    return SpeculativeConfig("eagle", str(folder), MAX_DRAFTS)


DRAFTERS: dict[str, MakeDrafter] = {
    "draft": smaller_model,
    "itself": model_itself,
    "self": rounded_model,
    "medusa": medusa_heads,
    "eagle": eagle_head,
}


def speculating(loaded: LoadedModel, speculative: SpeculativeConfig, size: Size) -> InProcessEngine:
    num_blocks, block_size, num_tokens, num_slots, num_in_flight = size
    settings = load_settings(loaded.model.name_or_path, num_kv_blocks=None, speculative=speculative)
    return InProcessEngine(
        loaded,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_slots,
        max_steps_in_flight=num_in_flight,
        max_drafts=MAX_DRAFTS,
        loaded_drafter=load_drafter(loaded, settings),
    )


@pytest.mark.long
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "demo"])
def test_answers_of_every_architecture_are_those_without_drafts(name: str, drafter: str, tmp_path: Path) -> None:
    """With all sampling parameters, greedy and seeded, in a pool that is too small: sequences are preempted."""
    loaded = prepared(name)[0]
    engine = speculating(loaded, DRAFTERS[drafter](loaded, tmp_path), SIZES[2])
    assert_alike(play(engine), expected(name))
    lengths = engine.manager.draft_lengths
    assert sum(lengths.num_drafted) > 0 and engine.manager.num_preemptions > 0
    if drafter == "itself":
        assert lengths.num_accepted[0] > lengths.num_drafted[0] / 8, "some answers are greedy, without penalties"


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("model_type", MTP_MODELS)
def test_answers_with_mtp_layers_are_those_without_drafts(model_type: str, size: Size, tmp_path: Path) -> None:
    """Of the architectures that are served, those whose checkpoints have such layers."""
    make_model(tmp_path, model_type, {**_LLAMA_LIKE, **MTP_MODELS[model_type]})
    add_mtp_layer(tmp_path)
    loaded = load(tmp_path)
    engine = speculating(loaded, SpeculativeConfig("mtp", "", MAX_DRAFTS), size)
    assert_alike(play(engine), play(InProcessEngine(loaded, num_blocks=200)))
    assert sum(engine.manager.draft_lengths.num_drafted) > 0
