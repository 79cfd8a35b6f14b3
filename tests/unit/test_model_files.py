"""Claims about what is read from a model's directory: its chat template, wherever its makers put it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import ConfigError
from servekit.model_files import DEMO_MODEL_PATH, ChatTemplate, find_chat_template, find_model


def write(directory: Path, **config: Any) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) == ChatTemplate(None, {})
    written = write(tmp_path, bos_token="<s>", chat_template=None)
    assert find_chat_template(written) == ChatTemplate(None, {"bos_token": "<s>"}), "a request's own may need them"


def test_a_template_is_found_in_the_configuration_with_the_tokens_that_it_names(tmp_path: Path) -> None:
    added = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True}
    write(tmp_path, chat_template="T", bos_token="<s>", eos_token=added, pad_token=None, model_max_length=1e30)
    assert find_chat_template(tmp_path) == ChatTemplate("T", {"bos_token": "<s>", "eos_token": "</s>"})


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    tools, default = {"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}
    assert find_chat_template(write(tmp_path, chat_template=[tools, default])) == ChatTemplate("D", {})
    assert find_chat_template(write(tmp_path, chat_template=[tools])).source is None


def test_a_file_of_its_own_comes_before_the_configuration_and_the_operators_before_both(tmp_path: Path) -> None:
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
def test_a_broken_configuration_is_the_operators_to_mend(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(ConfigError, match=r"the chat template cannot be read.*tokenizer_config\.json"):
        find_chat_template(tmp_path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_template_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "mine"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="mine"):
        find_chat_template(DEMO_MODEL_PATH, str(file))


def test_a_model_is_a_directory_or_the_demo_and_what_looks_like_a_path_is_not_fetched(tmp_path: Path) -> None:
    assert find_model("demo") == DEMO_MODEL_PATH
    assert find_model(str(tmp_path)) == tmp_path.resolve()
    for name in ("./nowhere", "/nowhere", "~/nowhere"):
        with pytest.raises(ConfigError, match="there is no such directory"):
            find_model(name)
    with pytest.raises(ConfigError, match="neither a directory nor a Hugging Face id"):
        find_model("no/such/model")
