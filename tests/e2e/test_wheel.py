"""A wheel with prebuilt kernels serves on a machine without a compiler, and has the load test and the doctor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.quick_compiler import quick_compiler
from tests.support.server_process import serving
from workers.csrc import prebuilt
from workers.csrc.build import MACROS

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_an_installed_wheel_serves_the_demo_model_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = quick_compiler(tmp_path)
    if compiler is None:
        pytest.skip("there is no C compiler")
    best = best_variant(monkeypatch, tmp_path)
    run(
        *(sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index"),
        *("--wheel-dir", str(tmp_path)),
        CC=str(compiler),
        HATCH_BUILD_HOOK_ENABLE_CUSTOM="true",
        SERVEKIT_KERNEL_VARIANTS=best,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-(manylinux_2_\d+|linux)_", wheel.name), "it is for one kind of machine"
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert packed == {f"workers/csrc/prebuilt/{best}-{dtype}.so" for dtype in MACROS}

    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    # Dependencies come from here: torch alone is a gigabyte. They are found after the environment's own packages.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environment = {
        "PATH": str(tmp_path / "venv" / "bin"),
        "PYTHONSAFEPATH": "1",  # do not import servekit from this folder
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    with serving(log=tmp_path / "log", environment=environment, python=python) as server:
        answer = server.generate("What color is the sky?")
        assert "blue" in answer["generated_text"]
        assert f"C kernels: prebuilt, {best}-float32" in server.log.read_text()
        libraries = Path(f"/proc/{server.worker_pids()[0]}/maps").read_text()
        assert f"{packages}/workers/csrc/prebuilt/{best}-float32.so" in libraries
        load = (
            "run",
            "--url",
            server.url,
            "--arrivals",
            "closed:1",
            "--workload",
            "queries:output=4",
            "--requests",
            "4",
        )
        tested = subprocess.run(
            [python, "-m", "loadtest", *load, "--out", str(tmp_path / "results")],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert tested.returncode in (0, 3), tested.stderr  # 3: this machine is too busy for a measurement
        assert "| failures | none |" in tested.stdout
    looked = subprocess.run(
        [python, "-m", "servekit", "doctor", "--json", "--port", "0"], env=environment, capture_output=True, text=True
    )
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert f"prebuilt, {best}-float32" in looked.stdout
    assert not list((tmp_path / "cache").glob("**/*.so")), "nothing was compiled"


def best_variant(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Return the name of the variant that this processor takes of a whole wheel."""
    for variant in prebuilt.VARIANTS:
        (folder / variant.library_name("float32")).touch()
    monkeypatch.setattr(prebuilt, "PREBUILT_FOLDER", folder)
    found = prebuilt.find_prebuilt("float32")
    assert found is not None
    return found.stem.removesuffix("-float32")


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
