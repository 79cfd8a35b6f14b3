"""A GPU on which Triton's kernels do not run is served by torch's operations, and the log says why."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch

from workers.device import triton_support
from workers.device.triton_support import triton_failure
from workers.layers import layer_replacement


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    triton_failure.cache_clear()
    yield
    triton_failure.cache_clear()


def install_probe(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """Let the smallest kernel raise an error, or run. Returns a list with an entry for each launch."""
    launched: list[str] = []

    def launch(device: object) -> None:
        launched.append(str(device))
        if error is not None:
            raise error

    probe = types.ModuleType("workers.device.triton_probe")
    probe.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "workers.device.triton_probe", probe)
    monkeypatch.setattr("workers.device.triton_probe", probe, raising=False)
    return launched


def test_a_missing_compiler_is_found_before_the_first_kernel_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")
    launched = install_probe(monkeypatch, error)
    expected = "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    assert [triton_failure(), triton_failure()] == [expected, expected]
    assert launched == ["cuda"] and len(caplog.records) == 1
    assert "Triton needs a C compiler" in caplog.messages[0]
    assert layer_replacement._replace_on_gpu(None, None, [], None, None) is None  # type: ignore[arg-type]


def test_a_kernel_that_runs_is_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = install_probe(monkeypatch, None)
    assert triton_failure() is None and triton_failure() is None and launched == ["cuda"]


def test_a_device_that_failed_is_no_failure_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    install_probe(monkeypatch, torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(torch.OutOfMemoryError):
        triton_failure()
    install_probe(monkeypatch, torch.AcceleratorError("CUDA error: no kernel image is available for execution"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)  # as every call then does, until the process ends
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        triton_failure()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert triton_failure() == "AcceleratorError: CUDA error: no kernel image is available for execution"


def test_the_errors_of_kernels_are_those_of_torch_and_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    assert triton_support.kernel_errors() == (RuntimeError, triton.TritonError)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_support.kernel_errors() == (RuntimeError,)
