"""Claims about the structure that no import contract can make."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("servekit/**/*.py"), *ROOT.glob("workers/*.py")])
# Where the wall clock is read.
FOR_PEOPLE = {
    "servekit/api/__init__.py": {"time.time"},
    "servekit/api/completions.py": {"time.time"},
    "servekit/logs.py": {"time.localtime"},
    "servekit/tracing.py": {"time.time_ns"},
}
# Anything that turns bytes into code, or files into pickled objects.
FORBIDDEN = {"pickle", "cloudpickle", "marshal", "dill", "shelve", "eval", "exec"}


def test_the_manager_side_never_loads_torch() -> None:
    code = "import servekit.server, sys; assert not {'torch', 'transformers', 'opentelemetry'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_help_of_the_worker_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "servekit.worker", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--task-fd" in done.stdout
    assert "torch" not in done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_nothing_unpickles_and_no_model_brings_code(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = {alias.name.split(".")[0] for alias in node.names} | {getattr(node, "module", None)}
            assert not imported & FORBIDDEN
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in FORBIDDEN
            assert name != "torch.load"
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_nothing_is_measured_with_a_clock_that_can_be_set(path: Path) -> None:
    """What the wall clock says is for people: dates in answers, traces and logs."""
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    asked = calls & {"time", "time.time", "time.time_ns", "time.localtime", "datetime.now", "datetime.utcnow"}
    assert asked == FOR_PEOPLE.get(path.relative_to(ROOT).as_posix(), set())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_every_module_opens_by_saying_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    assert len(path.read_text().splitlines()) <= 500, "split it along a noun"
