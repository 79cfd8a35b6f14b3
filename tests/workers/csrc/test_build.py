"""The C kernels are compiled once per version, and the log says why they cannot be."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from workers.csrc import build as module
from workers.csrc.build import c_library

ALL_SOURCES = module.SOURCES


@pytest.fixture(autouse=True)
def _no_library_in_memory() -> Iterator[None]:
    c_library.cache_clear()
    yield
    c_library.cache_clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile one source, without optimisation."""
    monkeypatch.setattr(module, "SOURCES", ("layers.c",))
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-O0"))


def test_without_a_compiler_the_log_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert c_library("float32") is None
    assert "no C compiler found (tried no-such-compiler)" in caplog.text
    assert "install GCC 12 or newer, or Clang" in caplog.text


def test_a_failing_compiler_is_quoted_and_nothing_is_left_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "FLAGS", ("-fno-such-flag",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert c_library("float32") is None
    assert "could not compile the C kernels" in caplog.text and "no-such-flag" in caplog.text
    assert not list((tmp_path / "servekit").iterdir())


@pytest.mark.usefixtures("quick")
def test_with_an_old_gcc_the_log_says_which_version_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-U__clang__", "-U__GNUC__", "-D__GNUC__=11"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert c_library("float32") is None
    assert "this compiler is too old: the C kernels need GCC 12 or newer, or Clang" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_library_is_compiled_once_and_folders_that_others_can_write_to_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert c_library("float32") is not None
    (library,) = (tmp_path / "servekit").iterdir()
    c_library.cache_clear()
    monkeypatch.setattr(module, "compile_library", lambda *_: pytest.fail("it was compiled again"))
    assert c_library("float32") is not None
    library.parent.chmod(0o777)
    assert module._cache_folder() is None


@pytest.mark.usefixtures("quick")
def test_the_cache_keeps_the_libraries_that_were_used_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MAX_CACHED_LIBRARIES", 2)
    folder = tmp_path / "servekit"
    folder.mkdir(mode=0o700)
    an_hour_ago_s = time.time() - 3600
    for age_s, name in enumerate(("recent.so", "old.so", "older.so", "notes.txt")):
        (folder / name).touch()
        os.utime(folder / name, (an_hour_ago_s - age_s, an_hour_ago_s - age_s))
    for name, age_s in (("compiling-now", 0), ("compiling-killed", 2 * module.STALE_AFTER_S)):
        (folder / name).mkdir()
        os.utime(folder / name, (time.time() - age_s, time.time() - age_s))
    assert c_library("float32") is not None
    kept = {path.name for path in folder.iterdir()}
    assert kept >= {"recent.so", "notes.txt", "compiling-now"} and len(kept) == 4
    (compiled,) = kept - {"recent.so", "notes.txt", "compiling-now"}
    os.utime(folder / compiled, (an_hour_ago_s - 100, an_hour_ago_s - 100))
    c_library.cache_clear()
    assert c_library("float32") is not None, "it is loaded from the cache"
    assert (folder / compiled).stat().st_mtime > an_hour_ago_s, "a library that is loaded counts as used"


@pytest.mark.usefixtures("quick")
def test_a_damaged_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = module.find_compiler()
    assert compiler is not None and module._cache_folder() is not None
    kept = tmp_path / "servekit" / module._library_name(compiler, module.MACROS["float32"])
    kept.write_bytes(b"no library")
    assert c_library("float32") is not None
    assert kept.stat().st_size > 1000


@pytest.mark.usefixtures("quick")
def test_a_user_without_a_home_gets_a_library_and_no_file_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/cache")
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    library = c_library("float32")
    assert library is not None and library.swiglu
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of all sources and headers, which is compiled in their place."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (*ALL_SOURCES, *module.HEADERS):
        (folder / name).write_text((module.FOLDER / name).read_text())
    monkeypatch.setattr(module, "FOLDER", folder)
    return folder


@pytest.mark.parametrize("touched", [*ALL_SOURCES, *module.HEADERS])
def test_the_name_of_a_library_depends_on_every_source_and_header(sources: Path, touched: str) -> None:
    compiler = module.find_compiler()
    assert compiler is not None
    before = module._library_name(compiler, ())
    assert module._library_name(compiler, ()) == before
    (sources / touched).write_text((sources / touched).read_text() + "\n")
    assert module._library_name(compiler, ()) != before


@pytest.mark.usefixtures("quick")
def test_a_changed_source_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    c_library("float32")
    (sources / "layers.c").write_text((sources / "layers.c").read_text() + "\n")
    c_library.cache_clear()
    c_library("float32")
    assert len(list((tmp_path / "cache" / "servekit").iterdir())) == 2


@pytest.mark.usefixtures("quick")
def test_a_library_that_is_being_compiled_ahead_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_library, num_runs = module.compile_library, 0

    def counted(*arguments: Any) -> Path:
        nonlocal num_runs
        num_runs += 1
        time.sleep(0.2)  # so that c_library is called while this compiles
        return compile_library(*arguments)

    monkeypatch.setattr(module, "compile_library", counted)
    monkeypatch.setattr(module, "MAX_CACHED_LIBRARIES", 1)
    (tmp_path / "servekit").mkdir(mode=0o700)
    old = tmp_path / "servekit" / "old.so"
    old.touch()
    os.utime(old, (0, 0))
    module.compile_ahead("float32")
    wait_until(lambda: num_runs == 1)
    assert c_library("float32") is not None and num_runs == 1
    assert not old.exists(), "old libraries are removed from the cache here, too"
    module.compile_ahead("float32")
    module.compile_ahead("float64")
    wait_until(lambda: not module._compiling.locked())
    assert num_runs == 1


@pytest.mark.usefixtures("quick")
def test_a_library_that_another_process_compiles_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert c_library("float32") is not None
    c_library.cache_clear()
    folder, other = tmp_path / "servekit", tmp_path / "other.so"
    (library,) = folder.iterdir()
    library.rename(other)
    monkeypatch.setattr(module, "compile_library", lambda *_: pytest.fail("it was compiled twice"))
    with ThreadPoolExecutor(1) as threads:
        with module._no_other_process(folder):  # the lock is of an open file, so another thread waits, too
            found = threads.submit(c_library, "float32")
            wait_until(module._compiling.locked)
            with pytest.raises(TimeoutError):
                found.result(timeout=4 * module.LOCK_POLL_S)
            other.rename(library)
        assert found.result(timeout=60) is not None


def test_a_process_that_compiles_for_too_long_is_not_waited_for(tmp_path: Path) -> None:
    with module._no_other_process(tmp_path):
        started_s = time.monotonic()
        with module._no_other_process(tmp_path, timeout_s=0.1):
            assert time.monotonic() - started_s >= 0.1


@pytest.mark.usefixtures("quick")
def test_a_failure_to_compile_ahead_is_logged_once_when_the_library_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLAGS", ("-fno-such-flag",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module.compile_ahead("float32")
    wait_until(lambda: not module._compiling.locked())
    assert c_library("float32") is None
    assert caplog.text.count("no-such-flag") == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
