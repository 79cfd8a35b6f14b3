"""Tests of finding a model's directory and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH, ChatTemplate, check_weights, find_chat_template, find_model
from servekit.errors import ConfigError


def write(directory: Path, **config: Any) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_model_may_have_no_template(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) == ChatTemplate(None, {})
    written = write(tmp_path, bos_token="<s>", chat_template=None)
    assert find_chat_template(written) == ChatTemplate(None, {"bos_token": "<s>"}), "a request's own may need them"


def test_a_template_in_the_configuration_is_found_with_its_special_tokens(tmp_path: Path) -> None:
    added = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True}
    write(tmp_path, chat_template="T", bos_token="<s>", eos_token=added, pad_token=None, model_max_length=1e30)
    assert find_chat_template(tmp_path) == ChatTemplate("T", {"bos_token": "<s>", "eos_token": "</s>"})


def test_the_default_one_of_several_templates_is_used(tmp_path: Path) -> None:
    tools, default = {"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}
    assert find_chat_template(write(tmp_path, chat_template=[tools, default])) == ChatTemplate("D", {}, "U")
    assert find_chat_template(write(tmp_path, chat_template=[tools])).source is None


def test_a_template_file_overrides_the_configuration_and_the_operators_file_overrides_both(tmp_path: Path) -> None:
    write(tmp_path, chat_template="T", bos_token="<s>")
    (tmp_path / "chat_template.jinja").write_text("J {{ é }}")
    assert find_chat_template(tmp_path) == ChatTemplate("J {{ é }}", {"bos_token": "<s>"})
    (tmp_path / "mine").write_text("M")
    assert find_chat_template(tmp_path, str(tmp_path / "mine")) == ChatTemplate("M", {"bos_token": "<s>"})
    (tmp_path / "tokenizer_config.json").unlink()
    assert find_chat_template(tmp_path) == ChatTemplate("J {{ é }}", {})


@pytest.mark.parametrize(
    "config",
    [
        b"{",
        b"[]",
        b'{"chat_template": "\xff"}',
        b'{"chat_template": 3}',
        b'{"chat_template": [{"name": "default"}]}',
        b'{"chat_template": [{"template": "T"}]}',
        b'{"chat_template": "T", "bos_token": {"text": "<s>"}}',
        b'{"chat_template": "T", "bos_token": {"content": 3}}',
    ],
)
def test_an_invalid_configuration_is_a_configuration_error(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(ConfigError, match=r"cannot read the chat template in .*tokenizer_config\.json"):
        find_chat_template(tmp_path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_template_file_is_named_in_the_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "mine"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="mine"):
        find_chat_template(DEMO_MODEL_PATH, str(file))


def test_a_path_that_does_not_exist_is_not_downloaded(tmp_path: Path) -> None:
    assert find_model("demo") == DEMO_MODEL_PATH
    assert find_model(str(tmp_path)) == tmp_path.resolve()
    for name in ("./nowhere", "/nowhere", "~/nowhere"):
        with pytest.raises(ConfigError, match="there is no such directory"):
            find_model(name)
    with pytest.raises(ConfigError, match="neither a directory nor a Hugging Face id"):
        find_model("no/such/model")


def test_a_file_that_is_no_model_is_refused_with_what_to_give_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "weights.bin"):
        (tmp_path / name).touch()
    for model in ("model.gguf", "./model.gguf", str(tmp_path / "model.gguf"), str(tmp_path)):
        with pytest.raises(ConfigError, match=r"model\.gguf does not begin with GGUF: it is damaged"):
            find_model(model)
    for model in ("nowhere.gguf", "./nowhere.gguf", "/nowhere/model.gguf"):
        with pytest.raises(ConfigError, match="there is no such file"):
            find_model(model)
    with pytest.raises(ConfigError, match=r"'weights\.bin' is a file; give a GGUF file, or the directory"):
        find_model("weights.bin")


def test_a_gguf_file_of_a_repository_is_downloaded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded: list[tuple[str, str, str | None]] = []

    def download(repository: str, name: str, *, revision: str | None, local_files_only: bool) -> str:
        assert not local_files_only
        downloaded.append((repository, name, revision))
        return str(tmp_path / "model.gguf")

    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr("servekit.engine.hub._Hub.is_reached", lambda *_: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ConfigError, match=r"model\.gguf does not begin with GGUF"):
        find_model("owner/name/folder/model-Q8_0.gguf")
    with pytest.raises(ConfigError, match=r"model\.gguf does not begin with GGUF"):
        find_model("owner/name/model-Q8_0.gguf@v2")
    assert downloaded == [("owner/name", "folder/model-Q8_0.gguf", None), ("owner/name", "model-Q8_0.gguf", "v2")]


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    for model in ("demo", "sim:h100-8b", str(tmp_path)):
        with pytest.raises(ConfigError, match="has no revisions; leave out --revision"):
            find_model(model, "v2")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"are pickled .*run `servekit convert \S+ OUT`"),
        ("pytorch_model-00001-of-00002.bin", "are pickled"),
        ("consolidated.00.pth", r"are pickles under the names of the makers' own code \(consolidated\.00\.pth\)"),
        ("tf_model.h5", "are TensorFlow's"),
        ("notes.md", "has no weights that servekit reads"),
    ],
)
def test_weights_in_another_format_are_refused_with_what_to_do(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=message):
        check_weights(tmp_path, str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    check_weights(tmp_path, str(tmp_path))
