"""Claims about which graphs a runner captures and keeps. Here, on a CPU, a graph is a function that is called again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.inprocess import InProcessEngine, load
from tests.workers.runner.test_cuda_graphs import Repeated
from workers.loading.model_manager import LoadedModel
from workers.runner import model_runner


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(DEMO_MODEL_PATH)


def capture_all(engine: InProcessEngine, change: Callable[[Tensor], object]) -> None:
    """Capture graphs which change their logits [num_rows, vocab_size]."""

    def capture(compute: Callable[[], None]) -> Repeated:
        def replay() -> None:
            compute()
            assert engine.runner._graphs is not None
            change(engine.runner._graphs.logits)

        compute()
        return Repeated(replay)

    engine.runner.capture_decodes(capture)
    engine.runner.capture_mixed_steps(capture)


def num_graphs(engine: InProcessEngine) -> tuple[int, int]:
    """Return how many graphs of decodes and of steps with prompts are left."""
    decodes, mixed = engine.runner._graphs, engine.runner._mixed_graphs
    assert decodes is not None and mixed is not None
    return len(decodes._graphs), len(mixed._graphs)


@pytest.mark.parametrize(("kv_cache_dtype", "keeps"), [("auto", False), ("int8", True)])
def test_graphs_over_rounded_pages_may_be_as_far_off_as_the_self_check_allows(
    kv_cache_dtype: str, keeps: bool, demo: LoadedModel
) -> None:
    engine = InProcessEngine(demo, kv_cache_dtype=kv_cache_dtype, max_num_seqs=4)
    capture_all(engine, lambda logits: logits.mul_(1.03))
    before = num_graphs(engine)
    engine.runner.self_check()
    assert before == (3, 5) and num_graphs(engine) == (before if keeps else (0, 0))


def test_graphs_are_checked_with_several_sequences(demo: LoadedModel) -> None:
    engine = InProcessEngine(demo, max_num_seqs=4)
    capture_all(engine, lambda logits: logits[2].mul_(2.0))
    engine.runner.self_check()
    assert num_graphs(engine) == (2, 0), "decodes of one and two sequences do not have the wrong row"


@torch.inference_mode()
def test_graphs_of_several_sequences_that_give_the_same_logits_stay(demo: LoadedModel) -> None:
    engine = InProcessEngine(demo, max_num_seqs=4)
    capture_all(engine, lambda _: None)
    pages = [each.clone() for each in engine.runner.cache.keys]
    engine.runner._run_in_chunks(demo.sample.token_ids)
    stored = [each.clone() for each in engine.runner.cache.keys]
    engine.runner._check_graphs_of_several(demo.sample.token_ids)
    assert num_graphs(engine) == (3, 5)
    for zeros, before, after in zip(pages, stored, engine.runner.cache.keys, strict=True):
        assert before.equal(after) and not before.equal(zeros), "nothing is stored"


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@torch.inference_mode()
def test_the_shortest_sequences_are_checked_too(num_tokens: int, demo: LoadedModel) -> None:
    engine = InProcessEngine(demo, max_num_seqs=4)
    capture_all(engine, lambda _: None)
    engine.runner._run_in_chunks(demo.sample.token_ids[:num_tokens])
    engine.runner._check_graphs_of_several(demo.sample.token_ids[:num_tokens])
    assert num_graphs(engine) == (3, 5)


@pytest.mark.parametrize(
    ("failing", "captured"),
    [
        ("", ["decodes", "decodes_with_adapters", "mixed_steps"]),
        ("decodes", ["decodes"]),
        ("decodes_with_adapters", ["decodes", "decodes_with_adapters", "mixed_steps"]),
        ("mixed_steps", ["decodes", "decodes_with_adapters", "mixed_steps"]),
    ],
)
def test_other_steps_are_captured_where_decodes_with_adapters_cannot_be(
    failing: str, captured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def capture(steps: str) -> Callable[[Any], None]:
        def call(_: Any) -> None:
            called.append(steps)
            if steps == failing:
                raise RuntimeError("no graph of these")

        return call

    runner: Any = SimpleNamespace(
        loaded=SimpleNamespace(ranks=None, lora=object()),
        attention=SimpleNamespace(supports_cuda_graphs=True),
        needs_hidden_states=False,
        **{f"capture_{steps}": capture(steps) for steps in ("decodes", "decodes_with_adapters", "mixed_steps")},
    )
    monkeypatch.setattr(model_runner, "CudaCapture", lambda: None)
    model_runner._capture(runner)
    assert called == captured
    names = {"decodes": "decode steps are", "decodes_with_adapters": "decode steps with adapters are"}
    assert len(caplog.messages) == bool(failing)
    assert not failing or caplog.messages[0].startswith(names.get(failing, "steps with prompts are"))
