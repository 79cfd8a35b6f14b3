"""Claims about how C is compiled, and kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workers import c_library as module
from workers.c_library import c_library

ALL_SOURCES = module.SOURCES


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    c_library.cache_clear()
    yield
    c_library.cache_clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One source, and no time spent on making it fast."""
    monkeypatch.setattr(module, "SOURCES", ("layers.c",))
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-O0"))


def test_without_a_compiler_there_is_none_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert c_library("float32") is None
    assert "no C compiler (no-such-compiler)" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "FLAGS", ("-fno-such-flag",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert c_library("float32") is None
    assert "could not compile" in caplog.text and "no-such-flag" in caplog.text
    assert not list((tmp_path / "servekit").iterdir()), "it left something behind"


@pytest.mark.usefixtures("quick")
def test_it_is_compiled_once_and_only_a_folder_of_our_own_is_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert c_library("float32") is not None
    (library,) = (tmp_path / "servekit").iterdir()
    c_library.cache_clear()
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: pytest.fail("it was compiled again"))
    assert c_library("float32") is not None
    library.parent.chmod(0o777)
    assert module._cache_folder() is None


@pytest.mark.usefixtures("quick")
def test_a_damaged_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = module._find_compiler()
    assert compiler is not None and module._cache_folder() is not None
    kept = tmp_path / "servekit" / module._name(compiler, module.MACROS["float32"])
    kept.write_bytes(b"no library")
    assert c_library("float32") is not None
    assert kept.stat().st_size > 1000


@pytest.mark.usefixtures("quick")
def test_a_user_without_a_home_has_it_too_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/cache")
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    library = c_library("float32")
    assert library is not None and library.swiglu
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("touched", [*ALL_SOURCES, *module.HEADERS])
def test_what_changed_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, touched: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (*ALL_SOURCES, *module.HEADERS):
        (folder / name).write_text((module.FOLDER / name).read_text())
    monkeypatch.setattr(module, "FOLDER", folder)
    monkeypatch.setattr(module, "SOURCES", ALL_SOURCES)
    c_library("float32")
    (folder / touched).write_text((folder / touched).read_text() + "\n")
    c_library.cache_clear()
    c_library("float32")
    assert len(list((tmp_path / "cache" / "servekit").iterdir())) == 2


@pytest.mark.usefixtures("quick")
def test_what_is_compiled_ahead_is_found_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run, num_runs = module.subprocess.run, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        time.sleep(0.2)  # so that it is asked for while it is compiled
        return run(*arguments, **options)

    monkeypatch.setattr(module.subprocess, "run", counted)
    module.compile_ahead("float32")
    wait_until(lambda: num_runs == 1)
    assert c_library("float32") is not None and num_runs == 1
    module.compile_ahead("float32")
    module.compile_ahead("float64")
    wait_until(lambda: not module._compiling.locked())
    assert num_runs == 1


@pytest.mark.usefixtures("quick")
def test_what_fails_ahead_is_told_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLAGS", ("-fno-such-flag",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module.compile_ahead("float32")
    wait_until(lambda: not module._compiling.locked())
    assert c_library("float32") is None
    assert caplog.text.count("no-such-flag") == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
