from pathlib import Path

import pytest

from servekit.config import settings
from servekit.embedded.settings import SERVER_SETTINGS, embedded_config
from servekit.errors import ConfigError


def test_settings_have_the_names_of_the_flags() -> None:
    config = embedded_config("sim:instant", {"max_num_seqs": 8, "enable_prefix_caching": False})
    assert (config.model, config.max_num_seqs, config.enable_prefix_caching) == ("sim:instant", 8, False)


def test_a_path_is_a_model() -> None:
    assert embedded_config(Path("/models/a"), {}).model == "/models/a"


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("max_num_seq", 8, "did you mean max_num_seqs?"),
        ("max_num_seqs", 0, "it takes integer from 1"),
        ("mem_fraction_static", 0.5, "gpu-memory-utilization"),  # another engine's name
        ("port", 8000, "a setting of the HTTP server"),
        ("cache_dir", "/tmp/x", "XDG_CACHE_HOME"),  # noqa: S108
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_do(name: str, value: object, advice: str) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        embedded_config("sim:instant", {name: value})
    assert advice in raised.value.message


def test_variables_for_servers_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVEKIT_MAX_NUM_SEQS", "3")
    assert embedded_config("sim:instant", {}).max_num_seqs != 3


def test_the_settings_of_servers_exist() -> None:
    assert {setting.name for setting in settings()} >= SERVER_SETTINGS
