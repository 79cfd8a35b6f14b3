"""Triton's kernels for tests: on a GPU if there is one, else in Triton's interpreter.

Import this before any module of workers that is written in Triton. It skips the importing module if Triton cannot be
used here.

The interpreter runs programs one after the other, in numpy. It truncates to bfloat16, and has its own rounding to
float8, so tolerances for these are wider here than a GPU needs. That the kernels compile is tested by
tests/workers/test_triton_compilation.py.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    pytest.skip("the interpreter of Triton 3.6 does not work with numpy 2.4", allow_module_level=True)


def interpret_library() -> None:
    """Make Triton's own functions interpreted. They were compiled if another module imported Triton before."""
    from triton.runtime.interpreter import InterpretedFunction

    library = triton.language.standard
    compiled = {name: each for name, each in vars(library).items() if isinstance(each, triton.runtime.JITFunction)}
    for name, function in compiled.items():
        interpreted = InterpretedFunction(function.fn)
        for module in (library, triton.language):
            if getattr(module, name, None) is function:
                setattr(module, name, interpreted)


def patch_language_once_per_launch() -> None:
    """Make the interpreter faster, without changing what it computes.

    It replaces the functions of triton.language at each launch, and once more in every call of a jitted function from a
    kernel, which takes 2 ms and finds nothing left to replace. Here it does so once per launch and module.
    """
    from triton.runtime import interpreter

    launch, patched_modules = interpreter.GridExecutor.__call__, set()

    def launch_patched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched_modules.clear()
        patched_modules.add(self.fn.__module__)
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched_modules:
            patched_modules.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_patched
    interpreter.InterpretedFunction.__call__ = call


with pytest.MonkeyPatch.context() as patch:
    if DEVICE.type == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
        interpret_library()
        patch_language_once_per_launch()
        for module_name in (
            "attention.triton_kernels",
            "attention.triton_rotary",
            "layers.triton_ops",
            "layers.triton_quantized",
            "sampling.triton_sampler",
            "attention.gpu_backends",
        ):
            patch.delitem(
                sys.modules, f"workers.{module_name}", raising=False
            )  # another module may have imported them, compiled
    from workers.attention import gpu_backends, triton_kernels, triton_rotary
    from workers.layers import triton_ops, triton_quantized
    from workers.sampling import triton_sampler

# Maximum distance of a vector as a share of its norm: half a unit in the last place; for bfloat16 a whole unit, because
# the interpreter truncates.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
NAN = float("nan")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers on the device."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_same(output: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Compare vectors [..., dim] by their distance as a share of the expected one's norm."""
    expected = expected.double()
    distances = (output.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert distances.max() <= (tolerance or TOLERANCES[output.dtype]), distances


__all__ = [
    "DEVICE",
    "NAN",
    "TOLERANCES",
    "assert_same",
    "gpu_backends",
    "random",
    "triton",
    "triton_kernels",
    "triton_ops",
    "triton_quantized",
    "triton_rotary",
    "triton_sampler",
]
