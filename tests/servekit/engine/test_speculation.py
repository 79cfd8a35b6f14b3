"""Which drafter is chosen for a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config import ServeConfig
from servekit.engine.speculation import choose_drafter
from servekit.errors import ConfigError
from servekit.protocol.speculative_config import SpeculativeConfig


def chosen(model_path: Path, speculative: str, **settings: object) -> SpeculativeConfig:
    return choose_drafter(ServeConfig(model=str(model_path), speculative=speculative, **settings), model_path)


def test_auto_takes_what_comes_with_the_model_behind_ngrams_and_else_these_alone(tmp_path: Path) -> None:
    assert chosen(tmp_path, "auto") == SpeculativeConfig("ngram", "", 7)
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 0}')
    assert chosen(tmp_path, "auto").method == "ngram"
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 1, "vocab_size": 9}')
    assert chosen(tmp_path, "auto") == SpeculativeConfig("mtp", "", 7, lookup_first=True)
    assert chosen(tmp_path, "auto", tensor_parallel_size=2).method == "ngram"
    (tmp_path / "config.json").write_text('{"num_mtp_layers": 1, "quantization_config": {"quant_method": "fp8"}}')
    assert chosen(tmp_path, "auto").method == "ngram"
    (tmp_path / "draft").mkdir()
    assert chosen(tmp_path, "auto") == SpeculativeConfig("draft", "", 7, lookup_first=True)


def test_a_pipeline_has_no_drafts(tmp_path: Path) -> None:
    assert chosen(tmp_path, "off", pipeline_parallel_size=2) == SpeculativeConfig()
    assert chosen(tmp_path, "auto", pipeline_parallel_size=2) == SpeculativeConfig()
    with pytest.raises(ConfigError, match="does not work with pipeline parallelism, and --pipeline-parallel-size is 2"):
        chosen(tmp_path, "ngram", pipeline_parallel_size=2)


@pytest.mark.parametrize("drafter", ["medusa:heads", "eagle:head:3", "mtp:1"])
def test_heads_behind_prompt_lookup_are_refused_with_tensor_parallelism(drafter: str, tmp_path: Path) -> None:
    """Each rank decides for itself whether it asks the head, and the head may need all ranks."""
    with pytest.raises(ConfigError, match=rf"tensor-parallel-size is 2.*choose --speculative {drafter}, or ngram"):
        chosen(tmp_path, f"ngram+{drafter}", tensor_parallel_size=2)


def test_a_draft_model_behind_prompt_lookup_works_with_tensor_parallelism(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    assert chosen(tmp_path, "ngram+draft", tensor_parallel_size=2).lookup_first
    assert chosen(tmp_path, "mtp", tensor_parallel_size=2).method == "mtp"


def test_the_files_of_a_drafter_are_found_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no draft folder comes with the model"):
        chosen(tmp_path, "draft")
    with pytest.raises(ConfigError, match=r"\(--speculative\): .*there is no such directory"):
        chosen(tmp_path, f"draft:{tmp_path}/missing")
    small = tmp_path / "small"
    small.mkdir()
    assert chosen(tmp_path, f"draft:{small}:2") == SpeculativeConfig("draft", str(small), 2)
    (tmp_path / "medusa").mkdir()
    assert chosen(tmp_path, "medusa") == SpeculativeConfig("medusa", "", 4)


def test_a_simulated_model_has_a_simulated_drafter(tmp_path: Path) -> None:
    config = ServeConfig(model="sim:instant", speculative="draft:nowhere:3")
    assert choose_drafter(config, tmp_path) == SpeculativeConfig("draft", "nowhere", 3)
    assert choose_drafter(ServeConfig(model="sim:instant", speculative="auto"), tmp_path).method == "ngram"
