"""Tests of model ids, revisions, caches and tokens, with a hub on this machine. The library reads its variables when it
is imported, so each case runs in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from servekit.engine.hub import split_revision
from servekit.errors import ConfigError
from tests.support.stub_hub import OTHER_TOKEN, TOKEN, Repository, StubHub, serving

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"code",
    "consolidated.safetensors": b"the same weights",
    "original/consolidated.00.pth": b"pickle",
}
PICKLED = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}

FIND = """
import json, sys
from pathlib import Path
from servekit.config import load_config
from servekit.engine.model_files import check_weights, find_model
from servekit.errors import ConfigError

answers = []
for model, revision in json.loads(sys.argv[1]):
    try:
        path = find_model(model, revision)
        check_weights(path, model, revision)
        answers.append({str(file.relative_to(path)): file.read_text() for file in path.rglob("*")})
    except ConfigError as error:
        answers.append(error.message)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[StubHub]:
    repositories = {
        "org/model": Repository({"main": FILES, "v2": {**FILES, "model.safetensors": b"newer"}}),
        "org/gated": Repository({"main": FILES}, is_gated=True),
        "org/private": Repository({"main": FILES}, is_private=True),
        "org/pickled": Repository({"main": PICKLED}),
        "org/flax": Repository({"main": {"config.json": b"{}", "flax_model.msgpack": b"x"}}),
    }
    with serving(repositories) as hub:
        yield hub


def find(
    endpoint: str, home: Path, *models: str, revision: str | None = None, **variables: str
) -> list[dict[str, str] | str]:
    """Return the files that are found for each model by name, or the error's message."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**inherited, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **variables}
    command = [sys.executable, "-c", FIND, json.dumps([(model, revision) for model in models])]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    answers: list[dict[str, str] | str] = json.loads(ended.stdout)
    return answers


def test_a_model_is_downloaded_at_its_revision_without_pickles_and_code(hub: StubHub, tmp_path: Path) -> None:
    hub.requests.clear()
    main, newer, by_commit = find(hub.url, tmp_path, "org/model", "org/model@v2", f"org/model@{commit('v2')}")
    wanted = {"config.json": "{}", "tokenizer.json": "[]", "model.safetensors": "weights"}
    assert main == wanted
    assert newer == by_commit == {**wanted, "model.safetensors": "newer"}
    assert sorted(set(hub.downloads)) == sorted(wanted)
    assert (tmp_path / "hub" / "models--org--model").is_dir(), "HF_HOME names the folder of the cache"


MISSING_FILE = """
from servekit.engine.hub import download_file
from servekit.errors import ConfigError

for name in ("config.json", "modules.json"):
    try:
        print(download_file("org/model", name, None).read_text())
    except ConfigError as error:
        print(type(error).__name__)
"""


def test_a_file_that_is_not_there_is_another_error_than_a_network_that_fails(hub: StubHub, tmp_path: Path) -> None:
    def ask(endpoint: str, **variables: str) -> list[str]:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), **variables}
        command = [sys.executable, "-c", MISSING_FILE]
        return subprocess.check_output(command, text=True, env=environment, timeout=60).split()

    assert ask("http://127.0.0.1:9") == ["ConfigError", "ConfigError"]
    assert ask(hub.url) == ["{}", "FileNotInRepository"]
    assert ask("http://127.0.0.1:9", HF_HUB_OFFLINE="1") == ["{}", "FileNotInRepository"]
    assert ask("http://127.0.0.1:9") == ["{}", "ConfigError"]


def commit(revision: str) -> str:
    found = Repository({revision: {}}).commit_of(revision)
    assert found is not None
    return found


def test_the_setting_names_the_revision_too(hub: StubHub, tmp_path: Path) -> None:
    (answer,) = find(hub.url, tmp_path, "org/model", revision="v2")
    assert isinstance(answer, dict) and answer["model.safetensors"] == "newer"


def test_what_is_in_the_cache_is_found_without_a_network(hub: StubHub, tmp_path: Path) -> None:
    find(hub.url, tmp_path, "org/model@v2")
    hub.requests.clear()
    cached, missing = find(hub.url, tmp_path, "org/model@v2", "org/model", HF_HUB_OFFLINE="1")
    assert isinstance(cached, dict) and cached["model.safetensors"] == "newer"
    assert missing == (
        f"model 'org/model' is not in the cache {tmp_path / 'hub'}, or not all of it, and HF_HUB_OFFLINE forbids to "
        "download it: run `hf download org/model` where there is a network and copy the cache (HF_HOME names its "
        "directory), or give a directory"
    )
    assert hub.requests == []
    cached, missing = find("http://127.0.0.1:9", tmp_path, "org/model@v2", "org/model")
    assert isinstance(cached, dict) and cached["model.safetensors"] == "newer"
    assert isinstance(missing, str) and missing.endswith(
        "and http://127.0.0.1:9 cannot be reached; check the name and the network, or give a directory"
    )


def test_a_hub_that_does_not_answer_is_asked_once_for_all_files(tmp_path: Path) -> None:
    """Without that, the library would ask for six minutes for a file, and wait without end for a snapshot."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        answers = find(endpoint, tmp_path, "org/model", "org/model/file.gguf", HF_HUB_ETAG_TIMEOUT="1")
        assert [str(answer).partition(" and http")[2] for answer in answers] == [
            f"{endpoint.removeprefix('http')} cannot be reached; check the name and the network, or give a directory"
        ] * 2
        silent.setblocking(False)
        requests = list[str]()
        with suppress(BlockingIOError):
            while True:
                with silent.accept()[0] as connection:
                    requests.append(connection.recv(4096).decode().partition(" HTTP")[0])
    assert [each for each in requests if "org/model" in each] == ["HEAD /org/model/resolve/main/config.json"]


def test_a_gated_model_says_how_to_get_access(hub: StubHub, tmp_path: Path) -> None:
    (without,) = find(hub.url, tmp_path, "org/gated")
    assert without == (
        f"model 'org/gated' is gated: ask for access at {hub.url}/org/gated with your Hugging Face account, and set "
        "HF_TOKEN to a token of this account with the permission to read (https://huggingface.co/settings/tokens)"
    )
    (other,) = find(hub.url, tmp_path, "org/gated", HF_TOKEN=OTHER_TOKEN)
    assert isinstance(other, str) and "the account of the token in HF_TOKEN has no access" in other
    gated, private = find(hub.url, tmp_path, "org/gated", "org/private", HF_TOKEN=TOKEN)
    assert isinstance(gated, dict) and isinstance(private, dict)


def test_what_the_hub_does_not_have_is_refused_in_a_sentence(hub: StubHub, tmp_path: Path) -> None:
    private, revision, pickled, flax = find(hub.url, tmp_path, "org/private", "org/model@v9", "org/pickled", "org/flax")
    assert private == (
        f"model 'org/private' is not a local directory, and there is no repository {hub.url}/org/private; check the "
        "name; if it is private, set HF_TOKEN to a token of an account that can read it"
    )
    assert revision == f"model 'org/model' has no branch, tag or commit 'v9'; {hub.url}/org/model/tree/main lists them"
    assert isinstance(pickled, str) and "`servekit convert org/pickled OUT`" in pickled
    assert isinstance(flax, str) and "are Flax's (flax_model.msgpack)" in flax


def test_a_revision_is_named_once() -> None:
    assert split_revision("org/name", None) == ("org/name", None)
    assert split_revision("org/name@v1", None) == split_revision("org/name", "v1") == ("org/name", "v1")
    assert split_revision("org/name@refs/pr/3", "refs/pr/3") == ("org/name", "refs/pr/3")
    with pytest.raises(ConfigError, match="names the revision 'v1', and --revision 'v2'; give one"):
        split_revision("org/name@v1", "v2")
    with pytest.raises(ConfigError, match="names no revision"):
        split_revision("org/name@", None)
