"""The arguments of the Ray Serve application."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from servekit.config import settings
from servekit.errors import ConfigError
from servekit.ray_cluster.serve_settings import PATHS, read_arguments, server_environment


def test_arguments_are_those_of_the_application_and_the_settings_of_the_servers() -> None:
    given = read_arguments({"model": "sim:step=1ms", "num_gpus": "2", "tensor-parallel-size": "2", "ui": False})
    assert given.settings.num_gpus == 2.0 and given.settings.most_replicas == 1
    assert given.config.tensor_parallel_size == 2 and not given.config.ui
    assert given.environment == {
        "SERVEKIT_MODEL": "sim:step=1ms",
        "SERVEKIT_TENSOR_PARALLEL_SIZE": "2",
        "SERVEKIT_UI": "False",
    }


def test_a_relative_path_is_the_same_model_wherever_a_replica_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read_arguments({"model": "model"}).environment["SERVEKIT_MODEL"] == str(tmp_path / "model")


def test_relative_paths_are_the_same_wherever_a_replica_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    paths = {name: f"folder/{name}" for name in PATHS if name != "api_keys_file"}
    variables = read_arguments(
        {**paths, "lora": "a=one,b=/two", "speculative": "ngram+draft:small:4", "scale_up_delay": 1}
    ).environment
    for name, path in paths.items():
        assert variables[f"SERVEKIT_{name.upper()}"] == str(tmp_path / path)
    assert variables["SERVEKIT_LORA"] == f"a={tmp_path}/one,b=/two"
    assert variables["SERVEKIT_SPECULATIVE"] == f"ngram+draft:{tmp_path}/small:4"
    assert "SERVEKIT_SCALE_UP_DELAY" not in variables, "Ray Serve scales, and not the server"
    of_hub = read_arguments({"speculative": "draft:owner/small", "kv_offload_dir": "~/blocks"}).environment
    assert of_hub == {"SERVEKIT_SPECULATIVE": "draft:owner/small", "SERVEKIT_KV_OFFLOAD_DIR": "~/blocks"}


def test_every_setting_with_a_path_is_made_absolute() -> None:
    named = {each.name for each in settings() if re.search(r"\b(file|folder|directory|PATH)\b", each.description)}
    no_paths = {"enable_lora", "batch_max_file_bytes", "journal_max_bytes", "journal_max_files", "listen_workers"}
    assert named - no_paths == {*PATHS, "model", "lora", "speculative"}


def test_a_server_has_the_settings_of_the_application_and_no_others_of_its_node() -> None:
    node = {"PATH": "/bin", "HF_TOKEN": "t", "SERVEKIT_MAX_NUM_SEQS": "1", "SERVEKIT_MODEL": "other"}
    of_server = {"PATH": "/bin", "HF_TOKEN": "t", "SERVEKIT_MODEL": "demo"}
    assert server_environment(node, {"SERVEKIT_MODEL": "demo"}) == of_server


def test_api_keys_of_a_node_are_not_dropped_without_a_word() -> None:
    node = {"SERVEKIT_API_KEY": "secret"}
    with pytest.raises(ConfigError, match=r"SERVEKIT_API_KEY of this node has no effect .* give api_key") as caught:
        server_environment(node, {})
    assert "secret" not in caught.value.message
    assert server_environment(node, {"SERVEKIT_API_KEY": "own"}) == {"SERVEKIT_API_KEY": "own"}


def test_as_many_servers_as_at_least_is_the_default_for_at_most() -> None:
    assert read_arguments({"min_replicas": 3}).settings.most_replicas == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_replica": 1}, r"has no argument 'min_replica'; .*min_replicas"),
        ({"min_replicas": "many"}, r"min_replicas = 'many' is not accepted"),
        ({"min_replicas": 0}, r"min_replicas = 0 is not accepted .* >= 1"),
        ({"min_replicas": 3, "max_replicas": 2}, r"max_replicas = 2 is less than min_replicas = 3"),
        ({"max_num_seqs": "x"}, r"max_num_seqs = 'x' is not accepted"),
        ({"placement": "ray"}, r"placement = 'ray': .* workers on its own node"),
        ({"listen_workers": "tcp://0.0.0.0:1"}, r"listen_workers = .* workers on its own node"),
        ({"max_data_parallel_size": 4}, r"max_data_parallel_size = 4: .* max_replicas"),
        ({"speculative": "unknown"}, r"'unknown' is no drafter"),
        ({"port": 9000}, r"port = 9000: .* its proxy listens"),
        ({"host": "::"}, r"host = '::': .* its proxy listens"),
        ({"api_keys_file": "keys.toml"}, r"need a key for GET /metrics"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments(arguments)


def test_a_replica_reads_metrics_with_the_key_that_it_is_given_or_else_the_first_one() -> None:
    assert read_arguments({}).metrics_key is None
    assert read_arguments({"api_key": "first, second"}).metrics_key == "first"
    assert read_arguments({"api_key": "first", "metrics_key": "own"}).metrics_key == "own"


def test_the_ingress_takes_bodies_as_large_as_the_servers_take() -> None:
    assert read_arguments({"max_body_bytes": 1000}).max_body_bytes == 1000
    given = {"max_body_bytes": 1000, "batch_dir": "batches", "batch_max_file_bytes": 2**20}
    assert read_arguments(given).max_body_bytes == 2**20
