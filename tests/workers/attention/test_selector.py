"""The selector chooses the fastest attention backend that can serve the layers, and logs why faster ones cannot."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from workers.attention import selector
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.selector import choose_attention
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, PageFormat, PlainPages
from workers.kv_cache.pages import LayerShape

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CPU = torch.device("cpu")
PLAIN, HALF = PlainPages(torch.float32), PlainPages(torch.bfloat16)
LAYERS, PARAMS = [LayerShape(2, 64, 64)], [AttentionParams(0.125)]


GPU = torch.device("cuda")


def _choose_on_gpu(
    layers: list[LayerShape], params: list[AttentionParams], block_size: int, pages: PageFormat
) -> AttentionBackend:
    return selector._choose_on_gpu(GPU, torch.bfloat16, layers, params, block_size, pages)


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A GPU of compute capability 8.0 with Triton and flash-attn 2. Returns why kernels fail there, by backend."""
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = lambda *_, **__: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(selector, "triton_failure", lambda: None)
    monkeypatch.setattr(selector, "_failures", {})
    failures: dict[str, str] = {}
    if importlib.util.find_spec("triton") is not None:
        from workers.attention import gpu_backends

        monkeypatch.setattr(gpu_backends, "failure_of", lambda backend, *_: failures.get(backend.name))
    return failures


def install_flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("flash_attn_interface")
    package.flash_attn_with_kvcache = lambda *_, **__: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)


@needs_triton
def test_flash_attn_is_preferred_if_it_can_serve_the_layers() -> None:
    assert _choose_on_gpu(LAYERS, PARAMS, 256, HALF).name == "flash_attn"


@needs_triton
@pytest.mark.parametrize(
    ("layers", "params", "block_size", "pages", "why"),
    [
        (LAYERS, PARAMS, 16, HALF, "needs pages of a multiple of 256 tokens, and --block-size is 16"),
        (LAYERS, [AttentionParams(1.0, sinks=torch.zeros(2))], 256, HALF, "has no attention sinks"),
        (LAYERS, PARAMS, 256, PLAIN, "does not compute in float32"),
        (LAYERS, PARAMS, 256, FLOAT8_PAGES, "cannot read fp8_e4m3 pages"),
        ([LayerShape(2, 192, 128)], PARAMS, 256, HALF, "needs key_dim = value_dim"),
        ([LayerShape(2, 512, 512)], PARAMS, 256, HALF, "a multiple of 8 and at most 256"),
    ],
)
def test_otherwise_triton_is_chosen_and_the_log_says_why(
    layers: list[LayerShape],
    params: list[AttentionParams],
    block_size: int,
    pages: PageFormat,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with caplog.at_level("INFO"):
        assert _choose_on_gpu(layers, params, block_size, pages).name == "triton"
    assert why in caplog.text


@needs_triton
def test_without_the_package_torchs_own_flash_attention_is_chosen_if_it_can_serve_the_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert _choose_on_gpu(LAYERS, PARAMS, 256, HALF).name == "torch_varlen"
    with caplog.at_level("INFO"):
        assert _choose_on_gpu(LAYERS, [AttentionParams(1.0, softcap=3.0)], 256, HALF).name == "triton"
    assert "torch's own flash attention has no soft caps" in caplog.text


@needs_triton
def test_flash_attn_3_is_preferred_on_hopper_with_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_attn_3(monkeypatch)
    assert _choose_on_gpu(LAYERS, PARAMS, 16, HALF).name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert _choose_on_gpu(LAYERS, PARAMS, 16, HALF).name == "flash_attn_3"
    assert _choose_on_gpu(LAYERS, PARAMS, 16, FLOAT8_PAGES).name == "triton"


@needs_triton
def test_a_backend_whose_kernels_fail_on_this_gpu_is_left_out(
    failures: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    failures["flash_attn"] = "attention with keys in 4 parts gives other results"
    assert _choose_on_gpu(LAYERS, PARAMS, 256, HALF).name == "torch_varlen"
    assert "flash_attn is left out: attention with keys in 4 parts gives other results" in caplog.text
    failures |= {"torch_varlen": "no kernel image", "triton": "OutOfResources: shared memory"}
    selector._failures.clear()
    assert _choose_on_gpu(LAYERS, PARAMS, 256, HALF).name == "torch"
    assert "Triton's kernels fail here: OutOfResources: shared memory" in caplog.text


@needs_triton
def test_kernels_are_checked_once_however_often_a_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.attention import gpu_backends

    checked: list[str] = []
    monkeypatch.setattr(gpu_backends, "failure_of", lambda backend, *_: checked.append(backend.name))
    for _ in range(2):
        _choose_on_gpu([*LAYERS, *LAYERS], [*PARAMS, *PARAMS], 16, HALF)
    assert checked == ["triton"]
    _choose_on_gpu(LAYERS, [AttentionParams(0.125, window=9)], 16, HALF)
    assert checked == ["triton"] * 2


@needs_triton
def test_layers_that_differ_in_the_checkpoints_scales_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.attention import gpu_backends

    checked: list[LayerShape] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_backends, "failure_of", lambda _, layer, *__: checked.append(layer.shape))
    scales = [(0.1, 0.2), (0.3, 0.4)]
    layers = [*(LayerShape(2, 64, 64, each, each) for each in scales), LayerShape(2, 64, 64, None, scales[0])]
    assert _choose_on_gpu(layers, PARAMS * 3, 16, FLOAT8_PAGES).name == "triton"
    ones = (1.0, 1.0)
    assert checked == [LayerShape(2, 64, 64, ones, ones), LayerShape(2, 64, 64, None, ones)]


@needs_triton
@pytest.mark.parametrize("error", [ImportError, OSError, AttributeError, RuntimeError])
def test_a_package_that_cannot_be_imported_is_left_out_whatever_it_raises(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Package(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise error("built for another torch") if name == "flash_attn_varlen_func" else AttributeError(name)

    monkeypatch.setitem(sys.modules, "flash_attn", Package("flash_attn"))
    assert _choose_on_gpu(LAYERS, PARAMS, 256, HALF).name == "torch_varlen"


def test_without_triton_torch_gathers_pages_and_the_log_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selector, "triton_failure", lambda: "RuntimeError: Failed to find C compiler")
    assert _choose_on_gpu(LAYERS, PARAMS, 16, HALF).name == "torch"
    assert "attention is slow: every step gathers its pages, because Triton's kernels do not run" in caplog.text
    assert "Failed to find C compiler" in caplog.text


def test_on_a_cpu_heads_that_are_too_large_for_the_kernel_are_gathered_by_torch() -> None:
    assert choose_attention(CPU, torch.float32, [LayerShape(1, 16, 16), LayerShape(1, 528, 16)], [], 16).name == "torch"
    assert choose_attention(CPU, torch.float16, [LayerShape(1, 16, 16)], [], 16).name == "torch"


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_kernel_reads_every_format(name: str, dtype: torch.dtype) -> None:
    assert choose_attention(CPU, dtype, LAYERS, PARAMS, 16, name).name == "cpu"


def test_on_a_cpu_without_the_kernel_the_log_warns_that_pages_are_decoded(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_attention(CPU, torch.float16, LAYERS, PARAMS, 16, "int8").name == "torch"
    assert "every step decodes its pages (int8)" in caplog.text


@needs_triton
@pytest.mark.parametrize(
    ("name", "capability", "backend"),
    [("int8", (8, 0), "triton"), ("fp8_e4m3", (8, 9), "triton"), ("fp8_e4m3", (8, 6), "torch")],
)
def test_on_a_gpu_triton_reads_int8_and_where_the_gpu_has_it_float8(
    name: str,
    capability: tuple[int, int],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert choose_attention(torch.device("cuda"), torch.bfloat16, LAYERS, PARAMS, 256, name).name == backend
    assert ("this GPU has no float8; --kv-cache-dtype int8 is fast on it" in caplog.text) == (backend == "torch")
