"""Claims about settings: four sources, one precedence, and errors that name the field."""

from pathlib import Path

import pytest

from servekit.cli import main
from servekit.config import ServeConfig, doubts, ignored_variables, load_config, non_default, settings
from servekit.errors import ConfigError


def test_command_line_beats_environment_beats_file_beats_default() -> None:
    toml = b'port = 1\nblock-size = 1\nmax_num_seqs = 1\nhost = "h"'
    config = load_config({"port": "3"}, {"SERVEKIT_PORT": "2", "SERVEKIT_BLOCK_SIZE": "2", "PATH": "/bin"}, toml)
    assert (config.port, config.block_size, config.max_num_seqs, config.host) == (3, 2, 1, "h")
    assert config.dtype == ServeConfig().dtype
    assert non_default(config) == {"host": "h", "port": 3, "max_num_seqs": 1, "block_size": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": "abc"}, r"port = 'abc' is not accepted \(--port, SERVEKIT_PORT\): it takes integer from 0 to 65535"),
        ({"port": "70000"}, "port = '70000'"),
        ({"dtype": "int3"}, "it takes one of auto, bfloat16, float16, float32"),
        ({"device": "tpu"}, "auto, cpu, cuda or cuda:N"),
        ({"model": ""}, "local path or Hugging Face id"),
        ({"enable_prefix_caching": "perhaps"}, "--enable-prefix-caching"),
        ({"gpu_memory_utilization": "1.5"}, "number above 0.0 to 1.0"),
        ({"max_num_seqs": "0"}, "integer from 1 to 65536"),
    ],
)
def test_wrong_value_names_the_field_and_what_is_accepted(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(arguments, {})


def test_a_model_is_known_by_its_served_name() -> None:
    assert load_config({}, {}).model_name == "demo"
    assert load_config({"served_model_name": "ours"}, {}).model_name == "ours"


def test_misspelt_names_are_refused_with_the_nearest_one() -> None:
    (warning,) = ignored_variables({"SERVEKIT_PRT": "1", "SERVEKIT_PORT": "1", "PATH": "/bin"})
    assert "SERVEKIT_PRT; did you mean SERVEKIT_PORT" in warning, "not fatal: Kubernetes makes up such names"
    with pytest.raises(ConfigError, match="'prot'; did you mean port"):
        load_config({}, {}, b"prot = 1")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config({}, {}, b"port = ")


def test_what_kubernetes_makes_of_a_services_name_is_no_setting() -> None:
    links = {
        "SERVEKIT_SERVICE_HOST": "10.0.0.1",
        "SERVEKIT_SERVICE_PORT": "8000",
        "SERVEKIT_SERVICE_PORT_HTTP": "8000",
        "SERVEKIT_PORT": "tcp://10.0.0.1:8000",
        "SERVEKIT_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "SERVEKIT_PORT_8000_TCP_ADDR": "10.0.0.1",
        "SERVEKIT_CANARY_PORT": "udp://10.0.0.1:8000",  # of a service that is called servekit-canary
        "SERVEKIT_CANARY_SERVICE_HOST": "10.0.0.1",
    }
    assert load_config({}, links) == ServeConfig()
    (warning,) = ignored_variables({**links, "SERVEKIT_HOST": "::"})
    assert "Kubernetes service links" in warning and "did you mean" not in warning
    assert all(f" {name}," in warning or f" {name}:" in warning for name in links)
    assert "SERVEKIT_HOST" not in warning
    with pytest.raises(ConfigError, match="port = 'tcp'"):
        load_config({}, {"SERVEKIT_PORT": "tcp"})
    meant = load_config({}, {"SERVEKIT_OTLP_ENDPOINT": "tcp://host:4318"})
    assert meant.otlp_endpoint == "tcp://host:4318", "wrong, which somebody else will say; not ignored"


def test_every_setting_is_described_and_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for setting in settings():
        assert setting.flag in text
        assert setting.description


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--port", "x"], "port = 'x'"),
        (["--config", "/nowhere.toml"], "--config /nowhere.toml"),
        (["one", "--model", "two"], "model is given twice: 'one' and --model 'two'"),
        (["--scheduling-polcy", "fcfs"], "did you mean --scheduling-policy?"),
        (["--no-enable-prefix-cachin"], "did you mean --no-enable-prefix-caching?"),
        (["--enable-prefix-caching", "false"], "switches take no value"),
    ],
)
def test_operator_mistakes_end_with_exit_code_2(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv]) == 2
    assert expected in capsys.readouterr().err


def test_flags_are_not_guessed_from_their_beginnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--por", "9000"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


def test_every_setting_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    for setting in settings():
        assert f"`{setting.flag}`" in text, f"docs/settings.md lacks {setting.flag}"


def test_settings_that_are_hardly_meant_are_pointed_out() -> None:
    assert doubts(load_config({}, {})) == []
    assert len(doubts(load_config({"max_num_batched_tokens": "4", "scheduling_policy": "fair"}, {}))) == 2
    assert "the weights are random" in doubts(load_config({"load_format": "dummy"}, {}))[0]
