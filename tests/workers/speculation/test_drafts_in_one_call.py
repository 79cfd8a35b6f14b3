"""All rounds of a draft model in one call of C give the drafts that its layers give, one call after the other."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from servekit.protocol.speculative_config import SpeculativeConfig
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.sequence import Sequence
from tests.support.inprocess import InProcessEngine, load
from tests.support.load_settings import load_settings
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from tests.workers.test_token_identity import make_prompts
from workers.csrc.build import c_library
from workers.layers.cpu_language_model import CpuLanguageModel, Span
from workers.layers.linear import can_pack
from workers.layers.skinny_gemm import SkinnyGemm, SkinnyGemmWeight
from workers.loading.model_manager import LoadedModel
from workers.speculation.draft_model import DraftModel, load_draft_model

MAX_DRAFTS = 5
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}  # multiples of 32, as in real models
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


class DifferentLengths(DraftLengths):
    """Each sequence of a step gets another number of drafts, also none."""

    def choose(self, sequences: Collection[Sequence], step_id: int, *_: float, **__: float) -> list[int]:
        return [(step_id + 2 * index) % (MAX_DRAFTS + 1) for index in range(len(sequences))]


def draft_of_itself(path: Path, dtype: str = "float32", **settings: object) -> tuple[LoadedModel, DraftModel]:
    """Load the model in `path`, and once more as its draft model; skip the test where C does not multiply."""
    library = c_library(dtype) if can_pack(getattr(torch, dtype)) else None
    weight = torch.randn(64, 64).to(getattr(torch, dtype))
    if library is None or not isinstance(SkinnyGemm(library).make_weight(weight, None), SkinnyGemmWeight):
        pytest.skip("this processor lacks the instructions, or oneDNN has a layout that the C code cannot read")
    loaded = load(path, dtype)
    speculative = SpeculativeConfig("draft", str(path), MAX_DRAFTS)
    load_message = load_settings(str(path), dtype=dtype, speculative=speculative, num_kv_blocks=None, **settings)
    return loaded, load_draft_model(loaded, load_message)


def engine_of(loaded: LoadedModel, draft: DraftModel) -> InProcessEngine:
    return InProcessEngine(loaded, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=draft)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in ("llama", "mistral_sliding", "qwen2", "qwen3", "phi3")),
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ],
)
def test_drafts_of_one_call_are_those_of_a_call_for_each_round(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """Of several sequences of different lengths, which want different numbers of drafts."""
    model_type, sizes = ARCHITECTURES[name]
    make_model(tmp_path, model_type, {**sizes, **SIZES, **changes})
    engine = engine_of(*draft_of_itself(tmp_path))
    engine.manager.draft_lengths = DifferentLengths(MAX_DRAFTS)
    drafter, num_rows, num_drafts, num_prompts = engine.runner.drafter, 0, 0, 0
    compute, in_one_call = drafter._compute, drafter._in_c
    assert in_one_call is not None

    def compared(spans: list[tuple[int, int, int]], numbers: list[int] | None = None) -> list[list[int]]:
        nonlocal num_rows, num_drafts, num_prompts
        drafter._in_c = None
        expected = compute(spans, numbers)
        drafter._in_c = in_one_call
        found = compute(spans, numbers)
        if numbers is None:
            num_prompts += len(spans)
            return found
        assert found == expected
        num_rows, num_drafts = max(num_rows, len(spans)), num_drafts + sum(map(len, found))
        return found

    drafter._compute = compared
    for prompt in make_prompts(VOCAB_SIZE):
        engine.add(prompt, max_tokens=24, ignore_eos=True)
    engine.run()
    assert num_rows > 4 and num_drafts > 100 and num_prompts > 4
    lengths = engine.manager.draft_lengths
    assert lengths.num_accepted == lengths.num_drafted, "prompts and drafts have left the right keys and values"


def test_drafts_in_bfloat16_are_mostly_right(tmp_path: Path) -> None:
    """Sums are rounded otherwise where the model verifies them, so a near tie may give another token."""
    model_type, sizes = ARCHITECTURES["llama"]
    make_model(tmp_path, model_type, {**sizes, **SIZES})
    engine = engine_of(*draft_of_itself(tmp_path, "bfloat16"))
    assert engine.runner.drafter._in_c is not None
    for prompt in make_prompts(VOCAB_SIZE):
        engine.add(prompt, max_tokens=24, ignore_eos=True)
    engine.run()
    lengths = engine.manager.draft_lengths
    assert sum(lengths.num_accepted) > 0.9 * sum(lengths.num_drafted) > 100


def test_ids_beyond_its_embedding_are_read_as_the_last_one_and_none_beyond_the_choices_is_drafted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, sizes = ARCHITECTURES["llama"]
    make_model(tmp_path, model_type, {**sizes, **SIZES})
    engine = engine_of(*draft_of_itself(tmp_path))
    spans: list[list[Span]] = []
    run = CpuLanguageModel.continue_greedily
    monkeypatch.setattr(
        CpuLanguageModel, "continue_greedily", lambda self, some: (spans.append(some), run(self, some))[1]
    )
    engine.add(make_prompts(VOCAB_SIZE)[2], max_tokens=24, ignore_eos=True)
    for _ in range(4):
        engine.step()
    continuation = engine.runner.drafter._in_c
    slot, start, stop, num_drafts = spans[-1][0]
    token_ids, cell = engine.runner.table.token_ids, slot * engine.runner.table.row_length + stop - 1

    def drafts_after(token_id: int) -> list[int]:
        token_ids[cell] = token_id
        return run(continuation, [(slot, start, stop, max(1, num_drafts))])[0]

    by_token = [drafts_after(token_id) for token_id in range(VOCAB_SIZE)]
    assert drafts_after(2**31 - 1) == by_token[-1] and by_token.count(by_token[-1]) < VOCAB_SIZE / 2
    continuation._model.num_choices = 1
    assert drafts_after(3) == [0] * len(by_token[3])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rope_parameters": DYNAMIC}),
        ("gpt2", {}),
        ("gemma2", {}),
        ("olmo3", {"layer_types": ["full_attention"] * 3}),  # its rotation has a type for each kind of layers
    ],
)
def test_other_models_make_their_drafts_one_call_after_the_other(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    model_type, sizes = ARCHITECTURES[name]
    make_model(tmp_path, model_type, {**sizes, **changes})
    assert engine_of(*draft_of_itself(tmp_path)).runner.drafter._in_c is None
