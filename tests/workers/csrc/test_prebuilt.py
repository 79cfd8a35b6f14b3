"""Of the libraries that a wheel contains, the best one for the processor is loaded, and no compiler is needed."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.csrc import build, prebuilt
from workers.csrc.prebuilt import VARIANTS, Variant, find_prebuilt

AVX2 = "flags : fpu abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse2 sse4_1 sse4_2 ssse3 xsave"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
VNNI = f"{AVX512} avx512_vnni"
BFLOAT16 = f"{VNNI} avx512vbmi avx512_bf16"
# Names of /proc/cpuinfo that differ from the compiler's by more than underscores.
NAMES_OF_MACROS = {"lzcnt": "abm", "bmi": "bmi1", "sse3": "pni", "lahfsahf": "lahf_lm", "crc32": "sse4_2"}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(prebuilt, "PREBUILT_FOLDER", tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_library_in_memory() -> Iterator[None]:
    build.c_library.cache_clear()
    yield
    build.c_library.cache_clear()


@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", f"{BFLOAT16} amx_tile amx_int8 amx_bf16", "amx"),
        ("x86_64", f"{BFLOAT16} amx_tile", "avx512-bf16"),
        ("x86_64", BFLOAT16, "avx512-bf16"),
        ("x86_64", VNNI, "avx512-vnni"),
        ("x86_64", AVX512, "avx2"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", "flags : fpu sse2", "baseline"),
        ("x86_64", "", "baseline"),
        ("aarch64", "Features : fp asimd", "baseline"),
        ("riscv64", "", None),
    ],
)
def test_the_best_library_that_the_processor_can_run_is_found(
    machine: str, features: str, name: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in VARIANTS:
        (folder / variant.library_name("bfloat16")).touch()
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: machine)
    monkeypatch.setattr(prebuilt, "processor_features", lambda: features)
    found = find_prebuilt("bfloat16")
    assert found == (None if name is None else folder / f"{name}-bfloat16.so")
    assert find_prebuilt("float32") is None, "there are none of this dtype"


def test_a_checkout_has_no_prebuilt_libraries() -> None:
    assert find_prebuilt("float32") is None


def test_with_a_prebuilt_library_no_compiler_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(build, "SOURCES", ("layers.c",))
    monkeypatch.setattr(build, "COMPILERS", ())
    every_processor = Variant("any", prebuilt.platform.machine(), ("-O0",))
    monkeypatch.setattr(prebuilt, "VARIANTS", (every_processor,))
    build.compile_library(compiler, every_processor.flags, folder / every_processor.library_name("float32"))
    with caplog.at_level(logging.INFO):
        library = build.c_library("float32")
    assert library is not None and library.swiglu.argtypes
    assert "C kernels: prebuilt, any-float32" in caplog.text


def test_a_prebuilt_library_that_cannot_be_loaded_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if build.find_compiler() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(build, "SOURCES", ("layers.c",))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for variant in VARIANTS:
        (folder / variant.library_name("float32")).write_bytes(b"no library")
    with caplog.at_level(logging.INFO):
        assert build.c_library("float32") is not None
    assert "the prebuilt C kernels cannot be loaded, so they are compiled" in caplog.text
    assert "C kernels: compiled by" in caplog.text


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.name}-{variant.machine}")
def test_the_features_of_a_variant_are_all_that_its_flags_take_for_granted(variant: Variant) -> None:
    """The compiler defines a macro for each extension that it may use."""
    compiler = build.find_compiler()
    if compiler is None or target_of(compiler) != variant.machine:
        pytest.skip("there is no compiler for this machine")
    granted = extensions(compiler, *variant.flags) - extensions(compiler, "-march=x86-64")
    known = {feature.replace("_", "") for feature in variant.features}
    assert {NAMES_OF_MACROS.get(name, name).replace("_", "") for name in granted} <= known


def target_of(compiler: str) -> str:
    command = [compiler, "-dumpmachine"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.partition("-")[0]


def extensions(compiler: str, *flags: str) -> set[str]:
    """Return the macros of the processor's extensions, in lower case and without underscores."""
    command = [compiler, *flags, "-dM", "-E", "-x", "c", "/dev/null"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name.replace("_", "").lower() for name in re.findall(r"#define __([A-Z][A-Z0-9_]*)__ 1$", text, re.M)}
    return {
        name for name in found if re.match("sse|ssse|avx|amx|bmi|lzcnt|popcnt|movbe|xsave|f16c|fma|lahf|crc32", name)
    }
