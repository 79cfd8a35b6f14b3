"""The hidden states between layers are those of transformers, whichever way the layers are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.batch import Batch
from workers.csrc.build import c_library
from workers.layers.cpu_decoder import CpuDecoder
from workers.layers.linear import can_pack
from workers.layers.skinny_gemm import SkinnyGemm
from workers.loading.model_manager import ModelManager
from workers.speculation.drafter import Drafter, DraftRequest, HiddenStates

LIBRARY = c_library("bfloat16") if can_pack(torch.bfloat16) else None
TOKENS = list(range(3, 23))


class Observer(Drafter):
    """Makes no drafts, and keeps what it sees."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.hidden_states = HiddenStates(of_all_tokens=True, layers=layers)
        self.seen: list[Tensor] = []

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        return [()] * len(requests)

    def observe(self, batch: Batch, hidden_states: Tensor) -> None:
        self.seen.append(hidden_states)


def observed(loaded: Any, layers: tuple[int, ...], **options: Any) -> Tensor:
    """Return the hidden states [num_tokens, num_layers * hidden_size] of a prompt's tokens."""
    observer = Observer(layers)
    engine = InProcessEngine(loaded, drafter=observer, **options)
    engine.add(TOKENS, max_tokens=1)
    engine.run()
    return torch.cat(observer.seen)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mixtral", "gemma2", "granite_scaled", "olmo2", "gpt2", "opt", "stablelm"]
)
def test_hidden_states_between_layers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, *ARCHITECTURES[name])
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == 3)
    outputs: list[Tensor] = []
    next(lists)[-1].register_forward_hook(
        lambda _, __, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.inference_mode():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[0][0], states[2][0], outputs[0].view_as(states[0])[0]], dim=-1)
    found = observed(load(tmp_path), (0, 2, 3), max_num_batched_tokens=8)  # a prompt in three chunks
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.skipif(
    LIBRARY is None or SkinnyGemm(LIBRARY).max_rows == 0,
    reason="this processor has no bfloat16 instructions, or there is no compiler",
)
def test_a_tap_divides_the_call_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, sizes = ARCHITECTURES["qwen3"]
    make_model(tmp_path, model_type, {**sizes, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8})
    calls: list[int] = []
    decode = CpuDecoder.decode
    monkeypatch.setattr(CpuDecoder, "decode", lambda self, x, *rest: (calls.append(len(x)), decode(self, x, *rest)))
    loaded = ModelManager("cpu").load(tmp_path, "bfloat16", None)
    if loaded.decoder.cpu_decoder is None:  # type: ignore[union-attr]
        pytest.skip("on this processor, oneDNN has a layout that the C code cannot read")
    in_one_call = observed(loaded, (1, 3), max_num_batched_tokens=8).float()
    assert calls == [8, 8, 4]
    monkeypatch.setattr(CpuDecoder, "can_decode", lambda *_: False)
    calls.clear()
    if loaded.decoder.cpu_decoder._takes_any_rows:  # type: ignore[union-attr]
        by_all_but_one = observed(loaded, (1, 3), max_num_batched_tokens=8).float()
        assert calls == [8, 8, 4]
        assert torch.equal(by_all_but_one, in_one_call)
        calls.clear()
    monkeypatch.setattr(CpuDecoder, "can_prefill", lambda *_: False)
    by_layers = observed(loaded, (1, 3), max_num_batched_tokens=8).float()
    assert not calls
    assert (in_one_call - by_layers).norm() <= 0.02 * by_layers.norm()
