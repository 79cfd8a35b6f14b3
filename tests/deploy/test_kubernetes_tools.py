"""Claims about the installation of Helm and of Kubernetes' schemas, without the network."""

from __future__ import annotations

import io
import platform
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import kubernetes

run = subprocess.run


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder, with a Helm of before."""
    folder = tmp_path / "kubernetes"
    folder.mkdir()
    (folder / "helm").write_text("the old one")
    monkeypatch.setattr(kubernetes, "TOOLS", folder)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return folder


def write_packages(folder: Path, helm: str) -> None:
    """Write packages like those of PyPI, whose Helm is the script `helm`."""
    layer, package = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as inner:
        inner.writestr("helm/helm", helm)
    with tarfile.open(fileobj=package, mode="w:gz") as archive:
        member = tarfile.TarInfo("package/lib/layer.zip")
        member.size = len(layer.getvalue())
        archive.addfile(member, io.BytesIO(layer.getvalue()))
    with zipfile.ZipFile(folder / "aws_cdk_lambda_layer-2.whl", "w") as outer:
        outer.writestr("aws_cdk/_jsii/layer.jsii.tgz", package.getvalue())
    with zipfile.ZipFile(folder / "kubernetes_validate-1.whl", "w") as wheel:
        for version in kubernetes.VERSIONS:
            wheel.writestr(f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict/pod-v1.json", "{}")


def install(monkeypatch: pytest.MonkeyPatch, helm: str) -> None:
    def run_without_network(command: list[Any], **options: Any) -> Any:
        if "download" not in command:
            return run(command, **options)
        write_packages(Path(command[command.index("--dest") + 1]), helm)
        return None

    monkeypatch.setattr(subprocess, "run", run_without_network)
    kubernetes.install()


def test_a_helm_that_runs_replaces_the_old_one(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "#!/bin/sh\ntest $1 = version\n")
    assert "version" in (tools / "helm").read_text()
    assert sorted(each.name for each in (tools / "schemas").iterdir()) == sorted(kubernetes.VERSIONS)
    install(monkeypatch, "#!/bin/sh\nexit 1\n")  # it is installed, so that nothing is done
    assert [each.name for each in tools.parent.iterdir()] == ["kubernetes"]


def test_a_helm_that_does_not_run_leaves_the_old_one_in_place(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        install(monkeypatch, "#!/bin/sh\nexit 1\n")
    assert [each.name for each in tools.iterdir()] == ["helm"] and (tools / "helm").read_text() == "the old one"
    assert [each.name for each in tools.parent.iterdir()] == ["kubernetes"]


def test_on_another_machine_nothing_is_installed(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(SystemExit, match="this machine is Linux aarch64: nothing was installed"):
        install(monkeypatch, "#!/bin/sh\n")
    assert (tools / "helm").read_text() == "the old one"
