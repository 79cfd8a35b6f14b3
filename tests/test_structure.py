"""Claims about the source code that import contracts cannot make."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import pure_core

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("servekit/**/*.py"), *ROOT.glob("workers/**/*.py")])
# The only calls that read the wall clock: for dates that people read, and to compare with the times of files.
WALL_CLOCK_CALLS = {
    "servekit/api/app.py": {"time.time"},
    "servekit/api/batch_storage.py": {"time.time"},
    "servekit/api/responses/ollama_format.py": {"time.time"},
    "servekit/cached_directory.py": {"time.time"},
    "servekit/api/responses/openai_format.py": {"time.time"},
    "servekit/api/responses/responses_api_format.py": {"time.time"},
    "servekit/doctor/probes.py": {"time.time"},
    "servekit/api/routes/predictions.py": {"time.time"},
    "servekit/protocol/logging.py": {"time.localtime"},
    "servekit/server/engine_process.py": {"time.time"},
    "servekit/observability/tracing.py": {"time.time_ns"},
    "workers/csrc/build.py": {"time.time"},
}
# Without scripts/demo_model: the trainer reads its own checkpoints.
PROGRAMS = sorted([*SOURCES, *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*.py")])
# Whatever turns bytes into code, files into pickled objects, or text into a shell command: modules,
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "marshal", "dill", "shelve", "joblib", "jsonpickle"}
# calls, by their whole name or by its last part,
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "yaml.load", "os.system", "os.popen"),
    *("multiprocessing.Queue", "multiprocessing.SimpleQueue", "multiprocessing.Manager"),
}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "import_module", "load_module", "getoutput"}
# and arguments.
UNSAFE_ARGUMENTS = ("allow_pickle", "trust_remote_code", "shell")
# The one exception: `servekit convert` unpickles weights, and nothing else, in an unprivileged process.
UNPICKLES_WEIGHTS = "workers/conversion/pickled_weights.py"


def test_the_manager_side_never_loads_torch() -> None:
    code = (
        "import servekit.server.server, sys; assert not {'torch', 'transformers', 'opentelemetry'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_help_of_the_worker_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "servekit.worker", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--connect" in done.stdout
    assert "torch" not in done.stderr


def unsafe(source: str) -> set[str]:
    """Return the imports and calls in a module's source that could run received data as code."""
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
def test_no_module_unpickles_or_runs_code_of_a_model(path: Path) -> None:
    allowed = {"torch.load"} if path == ROOT / UNPICKLES_WEIGHTS else set()
    assert unsafe(path.read_text()) == allowed


def test_the_only_module_that_unpickles_reads_weights_only() -> None:
    nodes = ast.walk(ast.parse((ROOT / UNPICKLES_WEIGHTS).read_text()))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert calls and all("weights_only=True" in map(ast.unparse, call.keywords) for call in calls)


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
def test_unsafe_source_is_found(source: str) -> None:
    assert unsafe(source)


def test_safe_source_that_looks_unsafe_is_not_reported() -> None:
    assert not unsafe("model.eval(); re.compile('a'); numpy.load(file, allow_pickle=False); tomllib.load(file)")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_duration_is_measured_with_the_wall_clock(path: Path) -> None:
    """The wall clock may be set at any time, so durations are never measured with it."""
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    wall_clock_calls = calls & {
        "time",
        "time.time",
        "time.time_ns",
        "time.localtime",
        "datetime.now",
        "datetime.utcnow",
    }
    assert wall_clock_calls == WALL_CLOCK_CALLS.get(path.relative_to(ROOT).as_posix(), set())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_every_module_begins_with_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring


def test_coverage_is_measured_of_exactly_the_modules_that_the_contract_calls_pure() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = tool["importlinter"]["contracts"]
    pure = next(contract for contract in contracts if contract["name"].startswith("the pure core"))
    # A package is measured by its files, a module by its own.
    paths = [name.replace(".", "/") for name in pure["source_modules"]]
    files = [f"{path}/*.py" if (ROOT / path).is_dir() else f"{path}.py" for path in paths]
    assert sorted(tool["coverage"]["run"]["include"]) == sorted(files)


@pytest.mark.parametrize("path", pure_core.test_files(), ids=lambda path: path.stem)
def test_tests_of_the_pure_core_start_no_process_and_wait_for_nothing(path: Path) -> None:
    """So coverage is the same on every machine, however slow it is."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert not imported & {"multiprocessing", "signal", "socket", "subprocess", "threading", "time"}
    assert not imported & {"tests.support.proc", "tests.support.raw_sockets", "tests.support.server_process"}


@pytest.mark.parametrize("package", ["servekit", "workers", "loadtest"])
def test_tests_have_the_folders_of_the_code(package: str) -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in ROOT.glob(f"tests/{package}/**/test_*.py")}
    assert all((ROOT / folder).is_dir() for folder in folders)
