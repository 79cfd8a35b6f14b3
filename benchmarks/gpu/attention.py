"""Which ways to attend there are, which one the worker takes for each size of block, and why not the others."""

from __future__ import annotations

import logging

import torch

from benchmarks.gpu.at_work import work
from benchmarks.gpu.session import Session
from workers.attention import choose_attention
from workers.kv_cache import LayerShape
from workers.page_dtype import PlainPages
from workers.paged_step import Score

BLOCK_SIZES = (16, 256)


def run(session: Session) -> None:
    log = logging.getLogger("servekit.worker")
    log.setLevel(logging.INFO)
    told = _Told()
    log.addHandler(told)
    with session.row("attention", block_size=None) as row:
        row["chosen"] = "what imports"
        row["why"] = "; ".join(_imports())
    for block_size in BLOCK_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            with session.row("attention", block_size=block_size, dtype=str(dtype)) as row:
                told.lines.clear()
                layers, scores = [LayerShape(8, 128, 128)], [Score(128**-0.5)]
                row["chosen"] = choose_attention(session.device, dtype, layers, scores, block_size).name
                row["why"] = "; ".join(told.lines)


class _Told(logging.Handler):
    """What the worker's log says of its choice."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _imports() -> list[str]:
    try:
        from workers import gpu_attention
    except ImportError as error:
        return [f"nothing of Triton: {error}"]
    pages, scores = PlainPages(torch.bfloat16), [Score(1.0)]
    told = ["triton"]
    for find in (gpu_attention.find_flash_attention, gpu_attention.find_varlen_attention):
        found = find(scores, pages)
        told.append(found if isinstance(found, str) else found.name)
    return told


if __name__ == "__main__":
    work(run)
