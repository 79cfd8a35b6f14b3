"""Where Triton's kernels run in tests: on a GPU if there is one, else in Triton's interpreter.

Import this before anything of workers that is written in Triton. It skips the module that imports it where there is no
Triton that can be used.
"""

from __future__ import annotations

import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    pytest.skip("the interpreter of Triton 3.6 does not work with numpy 2.4", allow_module_level=True)


def interpret_library() -> None:
    """Triton's own functions are compiled or interpreted from the moment it is imported, and somebody else may have."""
    from triton.runtime.interpreter import InterpretedFunction

    library = triton.language.standard
    compiled = {name: each for name, each in vars(library).items() if isinstance(each, triton.runtime.JITFunction)}
    for name, function in compiled.items():
        interpreted = InterpretedFunction(function.fn)
        for module in (library, triton.language):
            if getattr(module, name, None) is function:
                setattr(module, name, interpreted)


with pytest.MonkeyPatch.context() as patch:
    if DEVICE.type == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
        interpret_library()
        for module_name in ("triton_attention", "triton_layers", "triton_sampling", "gpu_attention"):
            patch.delitem(sys.modules, f"workers.{module_name}", raising=False)  # they may be here, and compiled
    from workers import gpu_attention, triton_attention, triton_layers, triton_sampling

__all__ = ["DEVICE", "gpu_attention", "triton", "triton_attention", "triton_layers", "triton_sampling"]
