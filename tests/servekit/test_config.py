"""Claims about settings and the command line: four sources, one precedence, errors that name the setting."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from servekit import cli
from servekit.cli import main
from servekit.config import (
    EXPLAINED_SETTINGS,
    RENAMED_SETTINGS,
    ServeConfig,
    check_host_memory,
    doubts,
    ignored_variables,
    load_config,
    non_default,
    settings,
)
from servekit.errors import ConfigError


def test_command_line_overrides_environment_overrides_file_overrides_default() -> None:
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
        ({"model": ""}, "directory, GGUF file or Hugging Face id"),
        ({"enable_prefix_caching": "perhaps"}, "--enable-prefix-caching"),
        ({"gpu_memory_utilization": "1.5"}, "number above 0.0 to 1.0"),
        ({"max_num_seqs": "0"}, "integer from 1 to 65536"),
    ],
)
def test_wrong_value_names_the_field_and_what_is_accepted(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(arguments, {})


def test_served_model_name_replaces_the_model_name() -> None:
    assert load_config({}, {}).model_name == "demo"
    assert load_config({"served_model_name": "ours"}, {}).model_name == "ours"


def test_misspelt_names_are_refused_with_the_nearest_one() -> None:
    (warning,) = ignored_variables({"SERVEKIT_PRT": "1", "SERVEKIT_PORT": "1", "PATH": "/bin"})
    assert "SERVEKIT_PRT; did you mean SERVEKIT_PORT" in warning, "no error: Kubernetes sets such variables"
    with pytest.raises(ConfigError, match="'prot'; did you mean port"):
        load_config({}, {}, b"prot = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config({}, {}, b"port = ")


def test_kubernetes_service_links_are_ignored_with_a_warning() -> None:
    links = {
        "SERVEKIT_SERVICE_HOST": "10.0.0.1",
        "SERVEKIT_SERVICE_PORT": "8000",
        "SERVEKIT_SERVICE_PORT_HTTP": "8000",
        "SERVEKIT_PORT": "tcp://10.0.0.1:8000",
        "SERVEKIT_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "SERVEKIT_PORT_8000_TCP_ADDR": "10.0.0.1",
        "SERVEKIT_CANARY_PORT": "udp://10.0.0.1:8000",  # of a service named servekit-canary
        "SERVEKIT_CANARY_SERVICE_HOST": "10.0.0.1",
    }
    assert load_config({}, links) == ServeConfig()
    (warning,) = ignored_variables({**links, "SERVEKIT_HOST": "::"})
    assert "these are Kubernetes service links" in warning and "did you mean" not in warning
    assert all(f" {name}," in warning or f" {name}:" in warning for name in links)
    assert "SERVEKIT_HOST" not in warning
    with pytest.raises(ConfigError, match="port = 'tcp'"):
        load_config({}, {"SERVEKIT_PORT": "tcp"})
    config = load_config({}, {"SERVEKIT_OTLP_ENDPOINT": "tcp://host:4318"})
    assert config.otlp_endpoint == "tcp://host:4318", "an invalid address, which the server refuses; not ignored"


def test_help_lists_every_setting_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
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
        (["one", "--model", "two"], "the model is given twice: 'one' and --model 'two'"),
        (["--scheduling-polcy", "fcfs"], "did you mean --scheduling-policy?"),
        (["--no-enable-prefix-cachin"], "did you mean --no-enable-prefix-caching?"),
        (["--enable-prefix-caching", "false"], "switches take no value"),
    ],
)
def test_invalid_command_lines_exit_with_code_2(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--lora-modules", "the setting is called --lora here"),
        ("--enable-expert-parallel", "--data-parallel-size gives each device the whole model"),
        ("-pp", "the setting is called --pipeline-parallel-size here"),
        ("-tp", "the setting is called --tensor-parallel-size here"),
        ("--quantize", "the setting is called --quantization here"),
        ("--no-enable-chunked-prefill", "this is always on"),
        ("--trust-remote-code", "code in a model's repository is never run"),
        ("--context-length", "the setting is called --max-model-len here"),
        ("--disable-radix-cache", "the setting is called --enable-prefix-caching here"),
        ("--enable-something-else", "see `servekit serve --help`"),
    ],
)
def test_flags_of_other_servers_are_explained(argument: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", argument, "2"]) == 2
    message = capsys.readouterr().err
    assert f"unknown argument {argument!r}; {expected}" in message and "did you mean" not in message


def test_explanations_of_other_servers_settings_are_true() -> None:
    names = {setting.name for setting in settings()}
    flags = {setting.flag for setting in settings()}
    assert set(RENAMED_SETTINGS.values()) <= names
    assert not (RENAMED_SETTINGS.keys() | EXPLAINED_SETTINGS.keys()) & names, "a setting that exists needs no entry"
    assert not RENAMED_SETTINGS.keys() & EXPLAINED_SETTINGS.keys()
    for explanation in EXPLAINED_SETTINGS.values():
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", explanation.partition("(hf download")[0]))
        assert shown <= flags, explanation


def test_other_servers_names_are_explained_in_files_and_variables_too() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'adapter_path'; --lora NAME=PATH loads a LoRA adapter"):
        load_config({}, {}, b"adapter_path = 'a'")
    (warning,) = ignored_variables({"SERVEKIT_EP_SIZE": "2"})
    assert "SERVEKIT_EP_SIZE; --data-parallel-size gives" in warning


def test_a_kv_cache_beyond_the_machines_memory_is_refused_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--device", "cpu", "--kv-cache-memory-bytes", "900000000000"]) == 2
    assert "kv_cache_memory_bytes = 900000000000 (--kv-cache-memory-bytes) is more than" in capsys.readouterr().err
    fits = ServeConfig(device="cpu", kv_cache_memory_bytes=1000)
    check_host_memory(fits, host_memory_bytes=1000)
    with pytest.raises(ConfigError, match="memory of 999 bytes; set less"):
        check_host_memory(fits, host_memory_bytes=999)
    for device, num_kv_blocks in (("auto", None), ("cuda:0", None), ("cpu", 8)):
        config = ServeConfig(device=device, kv_cache_memory_bytes=1000, num_kv_blocks=num_kv_blocks)
        check_host_memory(config, host_memory_bytes=1)
    apart = ServeConfig(prefill_replicas=2, kv_transfer_memory_bytes=500)
    check_host_memory(apart, host_memory_bytes=1000)
    with pytest.raises(ConfigError, match="for each of 2 prefill replicas, is more than this machine's memory of 999"):
        check_host_memory(apart, host_memory_bytes=999)
    joined = ServeConfig(prefill_replicas=2, kv_transfer_memory_bytes=500, listen_workers="unix:/x")
    check_host_memory(joined, host_memory_bytes=1)  # it is on other machines
    on_cpu = ServeConfig(
        device="cpu", data_parallel_size=4, kv_cache_memory_bytes=100, prefill_replicas=2, kv_transfer_memory_bytes=500
    )
    check_host_memory(on_cpu, host_memory_bytes=1400)
    with pytest.raises(ConfigError, match="for each of 4 workers, with 1000 bytes for blocks that are handed over is"):
        check_host_memory(on_cpu, host_memory_bytes=1399)


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("top", "rich"),
        ("top", "prompt_toolkit"),
        ("top", "httpx2"),
        ("chat", "prompt_toolkit"),
        ("chat", "httpx2"),
        ("eval --url", "httpx2"),
    ],
)
def test_terminal_commands_say_how_to_install_their_packages(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name.startswith(("servekit.terminal", "servekit.client", "servekit.evaluation", package)):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*command.split(), "http://127.0.0.1:1"]) == 2
    message = capsys.readouterr().err
    assert f"servekit {command.split()[0]} needs the package {package}" in message
    assert "in the checkout of servekit run: pip install '.[terminal]'" in message


def test_the_terminal_packages_are_an_extra_and_no_requirement_of_the_server() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = {re.split("[>=<]", each)[0].replace("-", "_") for each in project["optional-dependencies"]["terminal"]}
    assert extra == cli.TERMINAL_PACKAGES
    assert not extra & {re.split(r"[>=<\[]", each)[0].replace("-", "_") for each in project["dependencies"]}


def test_abbreviated_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--por", "9000"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


def test_every_setting_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    for setting in settings():
        assert f"`{setting.flag}`" in text, f"docs/settings.md lacks {setting.flag}"


def test_a_model_may_have_adapters_if_some_are_named_or_may_be_loaded() -> None:
    assert not load_config({}, {}).has_adapters
    assert load_config({"lora": "a=/adapters/a"}, {}).has_adapters
    assert load_config({"enable_lora": "true"}, {}).has_adapters


def test_doubtful_combinations_of_settings_are_reported() -> None:
    assert doubts(load_config({}, {})) == []
    assert len(doubts(load_config({"max_num_batched_tokens": "4", "scheduling_policy": "fair"}, {}))) == 2
    assert "the weights are random" in doubts(load_config({"load_format": "dummy"}, {}))[0]
    assert "has no effect" in doubts(load_config({"devices": "cpu,cpu", "device": "cuda"}, {}))[0]
    assert not doubts(load_config({"devices": "cpu,cpu", "data_parallel_size": "2"}, {}))
    transfer = {"kv_transfer_memory_bytes": "1000000"}
    assert "has no effect without prefill_replicas" in doubts(load_config(transfer, {}))[0]
    assert not doubts(load_config({**transfer, "prefill_replicas": "1"}, {}))
    joining = {"listen_workers": "unix:/run/servekit.sock", "device": "cuda:1"}
    assert "the server starts no worker itself" in doubts(load_config(joining, {}))[0]
    assert not doubts(load_config({**joining, "data_parallel_size": "1"}, {}))
    scaled = {"scale_target_wait": "1", "scale_down_delay": "60"}
    assert doubts(load_config(scaled, {}))[0].startswith("scale_target_wait, scale_down_delay: without effect")
    assert doubts(load_config({**scaled, "placement": "ray"}, {}))
    assert not doubts(load_config({**scaled, "placement": "ray", "max_data_parallel_size": "2"}, {}))


@pytest.mark.parametrize(
    ("given", "starts_workers"),
    [
        ({}, True),
        ({"data_parallel_size": "2"}, True),
        ({"listen_workers": "unix:/w"}, False),
        ({"listen_workers": "unix:/w", "device": "cuda:0"}, False),
        ({"listen_workers": "unix:/w", "data_parallel_size": "1"}, True),
        ({"listen_workers": "unix:/w", "devices": "cuda:0"}, True),
        ({"placement": "ray"}, False),
    ],
)
def test_a_server_that_workers_join_starts_workers_only_if_a_setting_asks_for_some(
    given: dict[str, str], starts_workers: bool
) -> None:
    config = load_config(given, {})
    assert config.starts_workers == starts_workers
    assert config.lets_workers_join == ("listen_workers" in given or "placement" in given)


def test_budget_smaller_than_one_body_gives_a_warning() -> None:
    assert "max_total_body_bytes = 5 is less" in doubts(ServeConfig(max_total_body_bytes=5))[0]
    assert not doubts(ServeConfig()) and not doubts(ServeConfig(max_total_body_bytes=2**23))
    assert "half of it for one tenant" in doubts(ServeConfig(max_total_body_bytes=2**23, api_key="k"))[0]
    assert "divided among 4 API processes" in doubts(ServeConfig(max_total_body_bytes=2**24, api_processes=4))[0]


def test_a_setting_lists_its_names_only_if_it_takes_nothing_else() -> None:
    choices = {setting.name: setting.choices for setting in settings()}
    assert choices["scheduling_policy"] == ["fair", "fcfs", "priority", "shortest"]
    assert choices["port"] == [] and choices["model"] == []
