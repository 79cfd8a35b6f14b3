"""The page of architectures: it shows the results of a run, of every model type, and a sample of them is true."""

from __future__ import annotations

import pytest
import transformers

from tests.architectures import MODEL_TYPES, PAGE, page_with_tables, read_data, result_in_process

SERVED = ["llama", "qwen2_moe", "gemma3_text", "deepseek_v3", "qwen3_vl", "granite_speech", "video_llama_3"]
REFUSED = ["bert", "whisper", "kosmos-2.5", "mamba", "llama4_text", "blip-2", "chameleon"]


def test_the_page_shows_the_results_of_every_model_type() -> None:
    results, version = read_data()
    text = PAGE.read_text()
    assert page_with_tables(text, results, version) == text, "run `python -m tests.architectures --write`"
    assert [*results] == MODEL_TYPES
    assert version == transformers.__version__, "run `python -m tests.architectures --write` with this transformers"


def test_every_refusal_gives_its_reason_and_what_to_do() -> None:
    results, _ = read_data()
    for name, result in results.items():
        assert result.outcome != "differs", name
        if result.outcome == "refused":
            assert result.text.startswith(f"architecture {result.architecture} cannot be served: "), name
            assert len(result.text.split("; ")) > 1, name


@pytest.mark.long
@pytest.mark.parametrize("model_type", [*SERVED, *REFUSED])
def test_a_model_type_is_served_or_refused_as_the_page_says(model_type: str) -> None:
    result = result_in_process(model_type)
    assert result.outcome == ("served" if model_type in SERVED else "refused")
    assert result == read_data()[0][model_type]
