"""Keys of remote servers are taken out of the environment."""

from __future__ import annotations

import os

import pytest

from servekit.errors import ConfigError
from servekit.remote.api_keys import check_api_key
from servekit.remote.settings import OpenAISettings


def test_key_is_kept_and_no_child_process_inherits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OpenAISettings(url="http://h/v1", api_key_env="KEY_OF_TEST")
    monkeypatch.setenv("KEY_OF_TEST", " sk-1\n")
    assert check_api_key("m", settings) == "sk-1"
    assert "KEY_OF_TEST" not in os.environ
    assert check_api_key("m", settings) == "sk-1", "the file is read again"
    assert check_api_key("m", OpenAISettings(url="http://h/v1")) is None


@pytest.mark.parametrize("key", ["", "  ", "schlüssel", "a\nb"])
def test_missing_key_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("NO_KEY_OF_TEST", key)
    with pytest.raises(ConfigError, match="NO_KEY_OF_TEST"):
        check_api_key("m", OpenAISettings(url="http://h/v1", api_key_env="NO_KEY_OF_TEST"))
