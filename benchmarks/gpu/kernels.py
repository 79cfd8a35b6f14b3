"""Check every kernel against float64, then time it: attention, the operations between products, and sampling."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from benchmarks.gpu import layer_kernels
from benchmarks.gpu.attention_cases import Case, Heads, make_case
from benchmarks.gpu.session import BLOCK_SIZE, Session
from benchmarks.gpu.shapes import Ceilings, visible_pairs
from benchmarks.gpu.stage_process import run_stage
from benchmarks.gpu.timing import bandwidth, error_of, kernel_s, num_copies
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.torch_backend import TorchAttention
from workers.kv_cache.kv_quantization import PlainPages

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of a row's norm
FLASH_BLOCK_SIZE = 256
LLAMA, SMALL, TINY = Heads(32, 8, 128), Heads(14, 2, 64), Heads(4, 2, 16)
Candidate = tuple[AttentionBackend, int]  # with its block size


def run(session: Session) -> None:
    torch.manual_seed(7)
    ceilings = session.ceilings()
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for attention, block_size in candidates(session, dtype):
                _check(session, attention, block_size, dtype)
        for attention, block_size in candidates(session, torch.bfloat16):
            _time_decode(session, attention, block_size, ceilings)
            _time_prefill(session, attention, block_size, ceilings)
        _time_dense(session, ceilings)
        layer_kernels.run(session, ceilings)


def candidates(session: Session, dtype: torch.dtype) -> list[Candidate]:
    """Return the backends that can be used here, with block sizes that they can read."""
    pages = PlainPages(dtype)
    if not session.on_gpu:
        return [(TorchAttention(pages), BLOCK_SIZE)]
    from workers.attention import gpu_backends  # not at the top: it needs Triton

    found: list[Candidate] = [(gpu_backends.TritonAttention(pages), BLOCK_SIZE)]
    if dtype is torch.bfloat16:
        found.append((gpu_backends.TritonAttention(pages), FLASH_BLOCK_SIZE))
        for load, block_size in (
            (gpu_backends.load_flash_attention_3, BLOCK_SIZE),
            (gpu_backends.load_flash_attention, FLASH_BLOCK_SIZE),
            (gpu_backends.load_varlen_attention, FLASH_BLOCK_SIZE),
        ):
            with contextlib.suppress(gpu_backends.BackendUnavailableError):
                found.append((load([], block_size, pages), block_size))
    return found


def _check(session: Session, attention: AttentionBackend, block_size: int, dtype: torch.dtype) -> None:
    """Check some shapes of heads and of steps on fresh inputs, as far as this backend supports them."""
    cases = [(LLAMA, AttentionParams(128**-0.5)), (SMALL, AttentionParams(64**-0.5))]
    if attention.name in ("triton", "torch"):
        sinks = torch.randn(6, device=session.device)
        cases += [(Heads(16, 8, 256), AttentionParams(0.06, window=100, softcap=20.0))]
        cases += [(Heads(6, 2, 80), AttentionParams(0.1, window=64, sinks=sinks))]
    steps = {
        "decode": [(1, 1000), (1, 17), (1, 1)],
        "mixed": [(1, 400), (100, 300), (7, 7), (64, 512)],
        "prompt": [(513, 513)],
    }
    for heads, params in cases:
        for step, rows in steps.items():
            what = f"{step}, {heads.num_heads}/{heads.num_kv_heads} heads of {heads.dim}"
            named = {"kernel": attention.name, "block_size": block_size, "dtype": str(dtype), "what": what}
            with session.row("errors", **named) as row:
                case = make_case(attention, heads, rows, params, block_size, dtype, session.device)
                row["error"] = error_of(case.attend().flatten(1), case.exact().flatten(1))
                row["limit"] = TOLERANCE[dtype]
                assert row["error"] < row["limit"], f"the error is {row['error']:.1e}"


def _time_decode(session: Session, attention: AttentionBackend, block_size: int, ceilings: Ceilings) -> None:
    """Time decode steps. The floor is to read keys and values once."""
    loads = [(batch, session.context) for batch in session.batches]
    loads += [(1, 8192), (32, 8192)] if session.on_gpu else []
    for heads in (LLAMA, SMALL) if session.on_gpu else (TINY,):
        for batch, context in loads:
            num_bytes = 2 * 2 * batch * context * heads.num_kv_heads * heads.dim
            named = {"kernel": attention.name, "block_size": block_size, "what": _name(heads, batch, 1, context)}
            with session.row("attention_speed", **named) as row:
                row |= _timed(session, attention, block_size, heads, [(1, context)] * batch, num_bytes)
                row |= bandwidth(num_bytes, row["seconds"], ceilings, session.device)


def _time_prefill(session: Session, attention: AttentionBackend, block_size: int, ceilings: Ceilings) -> None:
    """Time prompts. The floor is the multiplications, once for the scores and once for the values."""
    loads = [(1, 8192, 8192), (8, 1024, 1024), (1, 1024, 8192)] if session.on_gpu else [(1, 64, 64), (1, 16, 64)]
    heads = LLAMA if session.on_gpu else TINY
    for batch, num_queries, num_keys in loads:
        flop = 4 * batch * visible_pairs(num_queries, num_keys) * heads.num_heads * heads.dim
        named = {
            "kernel": attention.name, "block_size": block_size, "what": _name(heads, batch, num_queries, num_keys)
        }  # fmt: skip
        with session.row("attention_speed", **named) as row:
            rows, num_bytes = [(num_queries, num_keys)] * batch, 2**26
            row |= _timed(session, attention, block_size, heads, rows, num_bytes)
            row["flops"] = flop / row["seconds"]
            row["share"] = row["flops"] / ceilings.flops


def _timed(
    session: Session,
    attention: AttentionBackend,
    block_size: int,
    heads: Heads,
    rows: list[tuple[int, int]],
    num_bytes: int,
) -> dict[str, float | str]:
    def make() -> Case:
        params = AttentionParams(heads.dim**-0.5)
        return make_case(attention, heads, rows, params, block_size, torch.bfloat16, session.device)

    copies = [make() for _ in range(num_copies(num_bytes, session.device))]
    seconds, how = kernel_s([case.attend_to_pages for case in copies], session.device)
    return {"seconds": seconds, "how": how}


def _time_dense(session: Session, ceilings: Ceilings) -> None:
    """Time torch's attention over contiguous keys, to compare with pages."""
    heads = LLAMA if session.on_gpu else TINY
    batch, context, prompt = (32, session.context, 8192) if session.on_gpu else (4, session.context, 64)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, heads.dim, device=session.device).bfloat16()

    with session.row("attention_speed", kernel="torch, no pages", what=_name(heads, batch, 1, context)) as row:
        num_bytes = 2 * 2 * batch * context * heads.num_kv_heads * heads.dim
        group = heads.num_heads // heads.num_kv_heads  # more query rows: keys are read once
        sets = [
            [random(batch, heads.num_kv_heads, length) for length in (group, context, context)]
            for _ in range(num_copies(num_bytes, session.device))
        ]
        calls = [lambda each=each: F.scaled_dot_product_attention(*each) for each in sets]
        row["seconds"], row["how"] = kernel_s(calls, session.device)
        row |= bandwidth(num_bytes, row["seconds"], ceilings, session.device)
    with session.row("attention_speed", kernel="torch, no pages", what=_name(heads, 1, prompt, prompt)) as row:
        counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        inputs = [random(1, count, prompt) for count in counts]
        calls = [lambda: F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)]
        row["seconds"], row["how"] = kernel_s(calls, session.device)
        row["flops"] = 4 * visible_pairs(prompt, prompt) * heads.num_heads * heads.dim / row["seconds"]
        row["share"] = row["flops"] / ceilings.flops


def _name(heads: Heads, batch: int, num_queries: int, num_keys: int) -> str:
    return f"{heads.num_heads}/{heads.num_kv_heads} x {heads.dim}: {batch} x {num_queries:,} of {num_keys:,}"


if __name__ == "__main__":
    run_stage(run)
