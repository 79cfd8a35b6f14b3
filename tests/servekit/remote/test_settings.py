"""Addresses that a model file may name."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from servekit.remote.openai_request import Dialect
from servekit.remote.settings import TAKES, OpenAISettings, PredictorServerSettings, TritonSettings, VllmSettings


@pytest.mark.parametrize("url", ["http://gpu-7:8000/v1", "https://api.example.com", "http://[::1]:9/v1/", "http://h"])
def test_address_of_a_server(url: str) -> None:
    assert msgspec.convert({"url": url}, OpenAISettings).url == url


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"url": "gpu-7:8000"},
        {"url": "ftp://h/v1"},
        {"url": "file:///etc/passwd"},
        {"url": "http://user:password@h/v1"},
        {"url": "http://h/v1?key=secret"},
        {"url": "http://h/v1#x"},
        {"url": "http://h/v1\n"},
        {"url": "http:///v1"},
        {"url": "http://h", "api_key_env": "A B"},
        {"url": "http://h", "api_key": "sk-secret"},
        {"url": "http://h", "max_connections": 0},
        {"url": "http://h", "first_token_timeout": 0},
    ],
)
def test_mistakes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, OpenAISettings)


def test_each_field_says_what_it_takes() -> None:
    assert set(TAKES) == {
        name for each in (VllmSettings, TritonSettings, PredictorServerSettings) for name in each.__struct_fields__
    }


def test_each_kind_bounds_the_first_of_an_answer_by_a_setting_of_its_own() -> None:
    assert OpenAISettings(url="http://a", first_token_timeout=7.0).first_answer_timeout_s == 7.0
    assert VllmSettings(first_token_timeout=8.0).first_answer_timeout_s == 8.0
    assert TritonSettings(url="http://a", answer_timeout=9.0).first_answer_timeout_s == 9.0


@pytest.mark.parametrize("dialect", ["openai", "vllm", "tgi"])
def test_each_dialect_that_requests_are_written_in_can_be_set(dialect: str) -> None:
    assert msgspec.convert({"url": "http://h/v1", "dialect": dialect}, OpenAISettings).dialect == dialect
    assert dialect in get_args(Dialect)
