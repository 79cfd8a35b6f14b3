from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.config import ServeConfig
from servekit.engine import model_kind
from servekit.engine.hub import FileNotInRepository
from servekit.engine.model_kind import choose_kind
from servekit.errors import ConfigError

TRANSFORMER = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
FILES: list[tuple[dict[str, Any], str]] = [
    ({"config.json": {"architectures": ["LlamaForCausalLM"]}}, "generate"),
    ({"config.json": {"architectures": ["GPT2LMHeadModel"]}}, "generate"),
    ({"config.json": {"architectures": ["BertModel"]}}, "embed"),
    ({"config.json": {"architectures": ["XLMRobertaModel"]}}, "embed"),
    ({"config.json": {"architectures": ["Qwen3ForCausalLM"]}, "modules.json": TRANSFORMER}, "embed"),
    (
        {
            "config.json": {"architectures": ["BertForMaskedLM"]},
            "config_sentence_transformers.json": {"model_type": "SentenceTransformer"},
        },
        "embed",
    ),
    ({"config.json": {"architectures": ["BertForSequenceClassification"], **ONE_LABEL}}, "rerank"),
    ({"config.json": {"architectures": ["BertForSequenceClassification"]}}, "classify"),
    (
        {
            "config.json": {"architectures": ["BertForSequenceClassification"], **ONE_LABEL},
            "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
            "modules.json": TRANSFORMER,
        },
        "rerank",
    ),
    (
        {
            "config.json": {
                "architectures": ["BertForSequenceClassification"],
                "sbert_ce_default_activation_function": "x",
            }
        },
        "rerank",
    ),
    ({"config.json": {"architectures": ["ViTForImageClassification"]}}, "classify"),
    ({}, "generate"),
    ({"config.json": ["no object"]}, "generate"),
    ({"config.json": {"architectures": "BertModel"}}, "generate"),
]


@pytest.mark.parametrize(("files", "kind"), FILES)
def test_the_files_of_a_checkpoint_say_what_it_does(files: dict[str, Any], kind: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert choose_kind(ServeConfig(model=str(tmp_path))) == kind


def test_the_setting_comes_first() -> None:
    assert choose_kind(ServeConfig(model="./nowhere", kind="embed")) == "embed"


@pytest.mark.parametrize("model", ["demo", "sim:instant", "./nowhere", "/nowhere/model.gguf"])
def test_other_models_generate(model: str) -> None:
    assert choose_kind(ServeConfig(model=model)) == "generate"


def test_files_of_a_repository_are_asked_for_until_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    is_reachable = False

    def download(_: str, name: str, revision: str | None) -> Path:
        asked.append(name)
        if not is_reachable:
            raise ConfigError("no network")
        if name != "config.json":
            raise FileNotInRepository("no such file")
        file = tmp_path / str(revision)
        file.write_text(json.dumps({"architectures": ["BertModel" if revision == "v2" else "LlamaForCausalLM"]}))
        return file

    monkeypatch.setattr(model_kind, "download_file", download)
    monkeypatch.setattr(model_kind, "_KINDS", {})
    first, second = ServeConfig(model="org/name"), ServeConfig(model="org/name", revision="v2")
    assert choose_kind(second) == "generate" and len(asked) == 3
    is_reachable = True
    for _ in range(3):
        assert (choose_kind(first), choose_kind(second)) == ("generate", "embed")
    assert len(asked) == 3 + 2 * 3


def test_a_kind_is_kept_only_if_each_file_came_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a model that embeds would generate text for as long as the process runs."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "modules.json").write_text(json.dumps(TRANSFORMER))
    fails_for: set[str] = {"modules.json"}

    def download(_: str, name: str, revision: str | None) -> Path:
        if name in fails_for:
            raise ConfigError("could not be downloaded: the connection was reset")
        if not (tmp_path / name).exists():
            raise FileNotInRepository("no such file")
        return tmp_path / name

    monkeypatch.setattr(model_kind, "download_file", download)
    monkeypatch.setattr(model_kind, "_KINDS", {})
    assert choose_kind(ServeConfig(model="org/name")) == "generate"
    fails_for.clear()
    assert choose_kind(ServeConfig(model="org/name")) == "embed"
    fails_for.add("modules.json")
    assert choose_kind(ServeConfig(model="org/name")) == "embed", "it is known from now on"
