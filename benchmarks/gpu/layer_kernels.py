"""Check and time the kernels between a layer's products, and the samplers: error, and share of memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.session import Session, SkippedError
from benchmarks.gpu.shapes import Ceilings
from benchmarks.gpu.timing import bandwidth, error_of, kernel_s, num_copies
from servekit.protocol.sampling_params import SamplingParams
from workers.batch import SamplingRow
from workers.sampling import sampler

HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK = 4096, 14336, 32, 8, 128, 16
VOCAB_SIZE = 128256
TOLERANCE = 8e-3  # of a row's norm, in bfloat16
MAX_DIFFERENT = 0.01  # of the tokens; one in 10^5 numbers is so near to a boundary that float32 sums decide


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call with its own inputs."""

    call: Callable[[], object]
    num_bytes: int  # that it must read and write, at least
    error: Callable[[], float]


def run(session: Session, ceilings: Ceilings) -> None:
    if not session.on_gpu:
        with session.row("kernel_speed", kernel="layers and sampling"):
            raise SkippedError("Triton kernels need a GPU; tests/workers runs them in the interpreter")
        return
    for make in (_norm, _swiglu, _rotate):
        for num_tokens in (1, 128, 8192):
            with session.row("kernel_speed", kernel=make.__name__.strip("_"), what=f"{num_tokens:,} tokens") as row:
                kernel = make(num_tokens, session.device)
                row["error"], row["limit"] = kernel.error(), TOLERANCE
                row |= _timed([kernel], lambda make=make, n=num_tokens: make(n, session.device), session, ceilings)
                assert row["error"] < TOLERANCE, f"the error is {row['error']:.1e}"
    for name, fields in (
        ("greedy", {"temperature": 0.0}),
        ("temperature", {"temperature": 0.8}),
        ("top-p", {"temperature": 0.8, "top_p": 0.9}),
        ("top-k and top-p", {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    ):
        for batch in session.batches:
            with session.row("kernel_speed", kernel=f"sample, {name}", what=f"{batch} x {VOCAB_SIZE:,}") as row:
                kernel = _sample(batch, fields, session.device)
                row["error"], row["limit"] = kernel.error(), MAX_DIFFERENT
                make_another = lambda batch=batch, fields=fields: _sample(batch, fields, session.device)  # noqa: E731
                row |= _timed([kernel], make_another, session, ceilings)
                assert row["error"] <= MAX_DIFFERENT, f"{100 * row['error']:.1f} % of the tokens are others"


def _timed(
    kernels: list[Kernel], make: Callable[[], Kernel], session: Session, ceilings: Ceilings
) -> dict[str, float | str]:
    num_bytes = kernels[0].num_bytes
    kernels += [make() for _ in range(num_copies(num_bytes, session.device) - 1)]
    seconds, how = kernel_s([kernel.call for kernel in kernels], session.device)
    return {"seconds": seconds, "how": how, **bandwidth(num_bytes, seconds, ceilings, session.device)}


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def _norm(num_tokens: int, device: torch.device) -> Kernel:
    from workers.layers.triton_ops import add_norm

    residual, delta = _random(num_tokens, HIDDEN, device=device), _random(num_tokens, HIDDEN, device=device)
    weight = 1 + _random(HIDDEN, device=device) / 4

    def error() -> float:
        total = residual.clone()
        normed = add_norm(total, delta, weight, 1e-5)
        wide = total.double()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return max(error_of(total, residual.double() + delta.double()), error_of(normed, wide * factor * weight))

    # The sum grows from call to call, some twenty times, and stays far from bfloat16's limit.
    return Kernel(lambda: add_norm(residual, delta, weight, 1e-5), 2 * 4 * num_tokens * HIDDEN, error)


def _swiglu(num_tokens: int, device: torch.device) -> Kernel:
    from workers.layers.triton_ops import swiglu

    gate_up = _random(num_tokens, 2 * INNER, device=device)

    def error() -> float:
        gate, up = gate_up.double().chunk(2, dim=1)
        return error_of(swiglu(gate_up), torch.nn.functional.silu(gate) * up)

    return Kernel(lambda: swiglu(gate_up), 2 * 3 * num_tokens * INNER, error)


def _rotate(num_tokens: int, device: torch.device) -> Kernel:
    from workers.attention.triton_kernels import LayerPages
    from workers.attention.triton_rotary import rotate_and_store

    qkv = _random(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, device=device)
    angles = (10 * torch.randn(num_tokens, HEAD_DIM // 2, device=device)).repeat(1, 2)
    cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()
    num_blocks = -(-num_tokens // BLOCK)
    pages = torch.zeros(2, num_blocks, BLOCK, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    cells = torch.randperm(num_blocks * BLOCK, device=device)[:num_tokens]

    def call(into: Tensor = qkv) -> None:
        sizes = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
        rotate_and_store(into, *sizes, cosine, sine, None, None, 0.0, LayerPages(pages[0], pages[1]), cells)

    def error() -> float:
        before = qkv.unflatten(1, (-1, HEAD_DIM)).double()
        into = qkv.clone()
        call(into)
        first, second = before.chunk(2, dim=-1)
        rotated_half = torch.cat([-second, first], dim=-1)
        rotated = before * cosine.double()[:, None] + rotated_half * sine.double()[:, None]
        heads = into.unflatten(1, (-1, HEAD_DIM))[:, :NUM_HEADS]
        keys, values = (each.flatten(0, 1)[cells] for each in pages)
        assert torch.equal(values.double(), before[:, -NUM_KV_HEADS:]), "values were changed when they were stored"
        return max(
            error_of(heads, rotated[:, :NUM_HEADS]), error_of(keys, rotated[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS])
        )

    numbers = (2 * NUM_HEADS + 4 * NUM_KV_HEADS + 2) * HEAD_DIM  # queries are written back
    return Kernel(call, 2 * num_tokens * numbers, error)


def _sample(batch: int, fields: dict[str, float], device: torch.device) -> Kernel:
    """The error is the share of rows in which the CPU's sampler, in float64, chooses another token."""
    from workers.sampling.triton_sampler import Filters, sample

    logits = 3 * torch.randn(batch, VOCAB_SIZE, device=device)
    params = [SamplingParams(max_tokens=1, **fields, seed=seed) for seed in range(batch)]  # type: ignore[arg-type]
    rows = [SamplingRow(each, position=17) for each in params]
    temperatures = torch.full((batch,), fields["temperature"], device=device)
    uniforms = torch.tensor([sampler.uniform(each.seed, 17) for each in params], dtype=torch.float64, device=device)
    filters = None
    if any(row.is_filtered for row in rows):
        top_k = torch.full((batch,), int(fields.get("top_k", 0)), dtype=torch.int32, device=device)
        top_p = torch.full((batch,), fields.get("top_p", 1.0), device=device)
        filters = Filters(top_k, top_p, torch.zeros_like(top_p))

    def call() -> Tensor:
        return sample(logits, temperatures, uniforms, filters)

    def error() -> float:
        expected = sampler.sample(logits.cpu(), rows)
        return float((call().cpu() != expected).double().mean())

    return Kernel(call, 4 * batch * VOCAB_SIZE, error)
