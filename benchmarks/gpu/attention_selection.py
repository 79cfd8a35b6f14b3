"""Report the available attention backends, which one is selected for each block size, and why not the others."""

from __future__ import annotations

import logging

import torch

from benchmarks.gpu.session import Session
from benchmarks.gpu.stage_process import run_stage
from workers.attention.interface import AttentionParams
from workers.attention.selector import choose_attention
from workers.kv_cache.kv_quantization import PlainPages
from workers.kv_cache.pages import LayerShape

BLOCK_SIZES = (16, 256)


def run(session: Session) -> None:
    log = logging.getLogger("servekit.worker")
    log.setLevel(logging.INFO)
    logged = _LogLines()
    log.addHandler(logged)
    with session.row("attention", block_size=None) as row:
        row["chosen"] = "available"
        row["why"] = "; ".join(_imports())
    for block_size in BLOCK_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            with session.row("attention", block_size=block_size, dtype=str(dtype)) as row:
                logged.lines.clear()
                layers, params = [LayerShape(8, 128, 128)], [AttentionParams(128**-0.5, num_heads=32)]
                row["chosen"] = choose_attention(session.device, dtype, layers, params, block_size).name
                row["why"] = "; ".join(logged.lines)


class _LogLines(logging.Handler):
    """Keep the messages of the worker's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _imports() -> list[str]:
    try:
        from workers.attention import gpu_backends
    except ImportError as error:
        return [f"Triton cannot be imported: {error}"]
    pages, params = PlainPages(torch.bfloat16), [AttentionParams(1.0)]
    backends = ["triton"]
    loads = gpu_backends.load_flash_attention_3, gpu_backends.load_flash_attention, gpu_backends.load_varlen_attention
    for load in loads:
        try:
            backends.append(load(params, max(BLOCK_SIZES), pages).name)
        except gpu_backends.BackendUnavailableError as error:
            backends.append(str(error))
    return backends


if __name__ == "__main__":
    run_stage(run)
