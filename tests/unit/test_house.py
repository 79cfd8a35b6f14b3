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
# The trainer of the demo model reads checkpoints, its own.
PROGRAMS = sorted([*SOURCES, *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*.py")])
# Anything that turns bytes into code, files into pickled objects, or text into a shell's command: as modules,
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "marshal", "dill", "shelve", "joblib", "jsonpickle"}
# as what is called, by its whole name or by the last part of it,
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "yaml.load", "os.system", "os.popen"),
    *("multiprocessing.Queue", "multiprocessing.SimpleQueue", "multiprocessing.Manager"),
}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "import_module", "load_module", "getoutput"}
# and as arguments that ask for it.
UNSAFE_ARGUMENTS = ("allow_pickle", "trust_remote_code", "shell")


def test_the_manager_side_never_loads_torch() -> None:
    code = "import servekit.server, sys; assert not {'torch', 'transformers', 'opentelemetry'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_help_of_the_worker_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "servekit.worker", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--task-fd" in done.stdout
    assert "torch" not in done.stderr


def unsafe(source: str) -> set[str]:
    """What of a module's text could run what somebody sent."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES}
        elif isinstance(node, ast.ImportFrom):
            imported = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in imported if name.split(".")[0] in UNSAFE_MODULES or name in UNSAFE_CALLS}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in UNSAFE_CALLS or name.rpartition(".")[2] in UNSAFE_METHODS:
                found.add(name)
            for keyword in node.keywords:
                is_no = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in UNSAFE_ARGUMENTS and not is_no:
                    found.add(ast.unparse(keyword))
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_nothing_unpickles_and_no_model_brings_code(path: Path) -> None:
    assert not unsafe(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "from multiprocessing import Queue",
        "from torch import load",
        "from os import system",
        "torch.load(file)",
        "eval('1')",
        "socket.recv_pyobj()",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "numpy.load(file, allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=wanted)",
        "subprocess.run(command, shell=True)",
        "importlib.import_module(name)",
    ],
)
def test_what_is_unsafe_is_known(source: str) -> None:
    assert unsafe(source)


def test_what_only_looks_unsafe_is_not() -> None:
    assert not unsafe("model.eval(); re.compile('a'); numpy.load(file, allow_pickle=False); tomllib.load(file)")


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
