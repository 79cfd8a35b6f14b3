"""Every attention backend on a CPU agrees with a softmax in float64 over a sequence's own keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.emulated_attention import emulated_attention, trapped_attention
from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, HeadNorms, PagedStep
from workers.attention.selector import choose_attention, paged_attention
from workers.attention.torch_backend import TorchAttention
from workers.kv_cache.kv_quantization import PlainPages
from workers.kv_cache.pages import KVCache, LayerShape

Backend = tuple[AttentionBackend, torch.dtype]
CPU = torch.device("cpu")
TILES = {"emulated tiles": emulated_attention, "trapped tiles": trapped_attention}  # AMX; bfloat16
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def make_attention(name: str, dtype: torch.dtype) -> AttentionBackend:
    if name == "torch":
        return TorchAttention(PlainPages(dtype))
    if name in TILES:
        return CpuAttention(TILES[name](), dtype, PlainPages(dtype))
    chosen = choose_attention(CPU, dtype, [LayerShape(1, 16, 16)], [], 16)
    assert chosen.name == name
    return chosen


BACKENDS = [
    *(("cpu", torch.float32), ("cpu", torch.bfloat16), ("torch", torch.float32), ("emulated tiles", torch.bfloat16)),
    pytest.param(("trapped tiles", torch.bfloat16), marks=pytest.mark.long),  # the others test the same source
]


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    name, dtype = request.param
    return make_attention(name, dtype), dtype


class Module(torch.nn.Module):
    layer_idx = 0


class Case:
    """Sequences in scattered blocks, computed in steps that mix prompt chunks and single tokens."""

    # The tokens of each sequence after each step. A step computes the new ones.
    STEPS = ((8, 5, 4, 30, 1), (9, 6, 11, 70, 2), (9, 7, 12, 71, 20))

    def __init__(
        self,
        backend: Backend,
        shape: LayerShape = LayerShape(2, 64, 64),  # noqa: B008 - a value
        num_groups: int = 3,
        block_size: int = 16,
        params: AttentionParams = AttentionParams(0.2),  # noqa: B008 - a value
    ) -> None:
        torch.manual_seed(3)
        self.attention, self.dtype = backend
        self.shape, self.block_size, self.params = shape, block_size, params
        self.num_heads = num_groups * shape.num_kv_heads
        lengths = self.STEPS[-1]
        widths = [-(-length // block_size) for length in lengths]
        num_blocks = sum(widths) + 3
        blocks = np.random.default_rng(5).permutation(num_blocks)[: sum(widths)]
        self.tables = np.split(blocks, np.cumsum(widths)[:-1])
        cache_of = (self.attention.block_shapes, num_blocks, block_size, self.attention.page_dtype, CPU)
        self.cache = KVCache([shape], *cache_of)
        self.spare = next(block for block in range(num_blocks) if block not in blocks)
        sizes = ((self.num_heads, shape.key_dim), *((shape.num_kv_heads, d) for d in (shape.key_dim, shape.value_dim)))
        self.sequences = [[torch.randn(n, *size).to(self.dtype) for size in sizes] for n in lengths]

    def metadata(self, begin: tuple[int, ...], end: tuple[int, ...]) -> tuple[AttentionMetadata, list[int]]:
        """Return a step that computes positions [begin, end) of each sequence, and which sequences have any."""
        block_size = self.block_size
        members = [i for i, (start, stop) in enumerate(zip(begin, end, strict=True)) if stop > start]
        num_queries = np.array([end[i] - begin[i] for i in members])
        num_keys = np.array([end[i] for i in members])
        width = max(-(-end[i] // block_size) for i in members)
        table = torch.full((len(members), width), self.spare, dtype=torch.int32)
        cells: list[int] = []
        for row, i in enumerate(members):
            own = self.tables[i][:width]
            table[row, : len(own)] = torch.from_numpy(own)
            cells += [
                own[p // self.block_size] * self.block_size + p % self.block_size for p in range(begin[i], end[i])
            ]
        starts = torch.tensor([0, *num_queries.cumsum()], dtype=torch.int32)
        lengths = torch.from_numpy(num_keys).int()
        return AttentionMetadata(
            block_size, num_queries, num_keys, starts, lengths, table, torch.tensor(cells)
        ), members

    def run(self, compute: Callable[[PagedStep, list[Tensor]], Tensor]) -> list[Tensor]:
        """Return each sequence's output [num_tokens, num_heads, value_dim], concatenated over all steps."""
        outputs: list[list[Tensor]] = [[] for _ in self.sequences]
        for begin, end in zip(((0,) * 5, *self.STEPS), self.STEPS, strict=False):
            metadata, members = self.metadata(begin, end)
            flat = [torch.cat([self.sequences[i][kind][begin[i] : end[i]] for i in members]) for kind in range(3)]
            output = compute(PagedStep(self.attention, self.cache, metadata), flat)
            for i, part in zip(members, output.split(metadata.num_queries.tolist()), strict=True):
                outputs[i].append(part)
        return [torch.cat(parts) for parts in outputs]

    def attend(self, step: PagedStep, flat: list[Tensor]) -> Tensor:
        return self.attention.attend(step, 0, flat[0], flat[1], flat[2], self.params)

    def expected(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the result in float64, computed for the whole sequence at once."""
        queries, keys, values = (each.double() for each in (queries, keys, values))
        keys, values = (each.repeat_interleave(self.num_heads // each.shape[1], dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.params.scale
        if self.params.softcap is not None:
            scores = self.params.softcap * torch.tanh(scores / self.params.softcap)
        distance = torch.arange(len(queries))[:, None] - torch.arange(len(keys))
        seen = (distance >= 0) & (distance < (self.params.window or 10**9))
        scores = scores.masked_fill(~seen, -math.inf)
        if self.params.sinks is not None:
            sinks = self.params.sinks.double()[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)

    def assert_right(self, factor: float = 1.0) -> None:
        for output, sequence in zip(self.run(self.attend), self.sequences, strict=True):
            assert_same(output, self.expected(*sequence), factor)


def assert_same(output: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    distances = (output.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert distances.max() <= factor * TOLERANCES[output.dtype], distances


@pytest.mark.parametrize("dims", [(8, 8), (16, 16), (64, 64), (80, 80), (128, 128), (48, 32), (192, 128), (256, 256)])
@pytest.mark.parametrize("heads", [(1, 1), (2, 3), (8, 1), (1, 7), (2, 12)])
def test_heads_and_dimensions_may_be_any(backend: Backend, dims: tuple[int, int], heads: tuple[int, int]) -> None:
    Case(
        backend, LayerShape(heads[0], *dims), heads[1], params=AttentionParams(1.3 / math.sqrt(dims[0]))
    ).assert_right()


@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 32, 100])
@pytest.mark.parametrize("window", [None, 20])
def test_block_sizes_may_be_any(backend: Backend, block_size: int, window: int | None) -> None:
    Case(backend, block_size=block_size, params=AttentionParams(0.2, window)).assert_right()


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_windows_soft_caps_and_sinks(
    backend: Backend,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    num_groups: int,
) -> None:
    sinks = torch.linspace(-3, 3, 2 * num_groups).to(backend[1]) if with_sinks else None
    Case(backend, num_groups=num_groups, params=AttentionParams(0.2, window, softcap, sinks)).assert_right()


def test_large_scores_neither_overflow_nor_vanish(backend: Backend) -> None:
    # Scores of some hundreds are rounded before they are exponentiated, so the error is larger.
    Case(backend, params=AttentionParams(40.0)).assert_right(factor=20)


class LongPrompts(Case):
    """Prompts of several strips of 64 keys, some of them in two chunks."""

    STEPS = ((1, 140, 64, 0, 5), (2, 310, 65, 200, 6))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_groups", [1, 3, 12])
@pytest.mark.parametrize("rise", [0.0, 0.02, -0.02])
def test_scores_may_rise_or_fall_along_a_prompt(
    backend: Backend, rise: float, num_groups: int, window: int | None
) -> None:
    case = LongPrompts(backend, num_groups=num_groups, params=AttentionParams(0.2, window))
    for queries, keys, _ in case.sequences:
        queries += 1.0  # so the keys' rise adds 0.2 * 64 * rise * p to the score of the key at position p
        keys += rise * torch.arange(len(keys))[:, None, None]
    case.assert_right(factor=20 if rise else 1)  # as above: scores of up to 80


def test_transformers_interface_gives_the_same(backend: Backend) -> None:
    sinks = torch.linspace(-1, 1, 6).to(backend[1])
    case = Case(backend, params=AttentionParams(64**-0.5, 9, 4.0, sinks))
    options = {"sliding_window": 9, "softcap": 4.0, "s_aux": sinks, "dropout": 0.0}

    def compute(step: PagedStep, flat: list[Tensor]) -> Tensor:
        queries, keys, values = (each.transpose(0, 1)[None] for each in flat)
        output, _ = paged_attention(Module(), queries, keys, values, None, paged=step, **options)
        return output[0]

    for output, sequence in zip(case.run(compute), case.sequences, strict=True):
        assert_same(output, case.expected(*sequence))


@pytest.mark.parametrize("kind_of_norms", ["", "of each head", "of all heads"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (128, 128), (64, 16), (48, 36)])
def test_rotating_and_attending_gives_what_transformers_rotation_gives(
    backend: Backend, kind_of_norms: str, head_dim: int, rotary_dim: int
) -> None:
    case = Case(backend, LayerShape(2, head_dim, head_dim), params=AttentionParams(head_dim**-0.5))
    norms = None
    if kind_of_norms:
        spans = kind_of_norms == "of all heads"
        sizes = [heads * head_dim if spans else head_dim for heads in (case.num_heads, 2)]
        norms = HeadNorms(*(torch.rand(size) + 0.5 for size in sizes), 1e-5, spans)
    longest = max(case.STEPS[-1])
    angles = torch.outer(torch.arange(longest), 1000.0 ** -torch.linspace(0, 1, rotary_dim // 2)).repeat(1, 2)
    rotation = angles.cos().to(case.dtype), angles.sin().to(case.dtype)

    def compute(step: PagedStep, flat: list[Tensor]) -> Tensor:
        keys, counts = step.metadata.num_keys, step.metadata.num_queries
        at = torch.cat([torch.arange(k - n, k) for k, n in zip(keys, counts, strict=True)])
        qkv = torch.cat([each.flatten(1) for each in flat], dim=1)
        cosines, sines = (each[at].contiguous() for each in rotation)
        output = case.attention.rotate_and_attend(step, 0, qkv, (cosines, sines), norms, case.params)
        return output.view(len(at), case.num_heads, head_dim)

    def prepared(heads: Tensor, weight: Tensor | None) -> Tensor:
        heads = heads.double()
        if weight is not None:
            heads = heads.flatten(1) if len(weight) > head_dim else heads
            heads = torch.nn.functional.rms_norm(heads, weight.shape, weight.double(), 1e-5).unflatten(
                -1, (-1, head_dim)
            )
            heads = heads.view(len(heads), -1, head_dim)
        heads, others = heads.tensor_split((rotary_dim,), dim=-1)
        cosines, sines = (each[: len(heads)].double()[None] for each in rotation)
        heads = heads.transpose(0, 1)[None]
        rotated = apply_rotary_pos_emb(heads, heads, cosines, sines)[0][0].transpose(0, 1)
        return torch.cat([rotated, others], dim=-1)

    for output, (queries, keys, values) in zip(case.run(compute), case.sequences, strict=True):
        weights = (None, None) if norms is None else (norms.query_weight, norms.key_weight)
        expected = case.expected(prepared(queries, weights[0]), prepared(keys, weights[1]), values)
        assert_same(output, expected, factor=3)  # queries and keys were rounded in between


def test_numbers_that_are_not_finite_affect_only_their_own_sequence(backend: Backend) -> None:
    case = Case(backend)
    for poison, tensor in zip((math.nan, math.inf, -math.inf), case.sequences[3], strict=True):
        tensor[40:50] = poison
    outputs = case.run(case.attend)
    assert all(torch.isfinite(pages).all() for pages in (case.cache.keys[0], case.cache.values[0]))
    for i in (0, 1, 2, 4):
        assert_same(outputs[i], case.expected(*case.sequences[i]))


def test_a_reused_block_may_hold_the_largest_numbers(backend: Backend) -> None:
    case = Case(backend)
    case.cache.keys[0].fill_(1e30), case.cache.values[0].fill_(3e38)
    outputs = case.run(case.attend)
    for output, sequence in zip(outputs, case.sequences, strict=True):
        assert_same(output, case.expected(*sequence))


def test_a_copied_block_gives_the_same_result(backend: Backend) -> None:
    case = Case(backend)
    case.run(case.attend)
    begin, end = (0, 0, 0, 70, 0), (0, 0, 0, 71, 0)
    metadata, _ = case.metadata(begin, end)
    flat = [kind[70:71] for kind in case.sequences[3]]
    before = case.attend(PagedStep(case.attention, case.cache, metadata), flat)
    old = int(case.tables[3][-1])
    case.cache.copy_blocks(torch.tensor([old]), torch.tensor([case.spare]))
    case.cache.keys[0][old] = case.cache.values[0][old] = 0
    case.tables[3][-1] = case.spare
    metadata, _ = case.metadata(begin, end)
    after = case.attend(PagedStep(case.attention, case.cache, metadata), flat)
    assert torch.equal(before, after)


def test_a_layers_parameters_may_change(backend: Backend) -> None:
    """The struct that the CPU backend keeps for a layer must not outlive its parameters."""
    case = Case(backend)
    case.assert_right()
    case.params = replace(case.params, window=7)
    case.assert_right()


@pytest.mark.parametrize(
    ("name", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("emulated tiles", torch.bfloat16)]
)
def test_a_prompt_gives_the_same_bits_however_it_is_cut_into_chunks(name: str, dtype: torch.dtype) -> None:
    class Whole(Case):
        STEPS = ((100, 133, 64, 81, 17),)

    class InChunks(Case):
        STEPS = ((17, 75, 33, 64, 17), (50, 110, 64, 81, 17), (100, 133, 64, 81, 17))  # of more than 16 tokens

    cases = [kind((make_attention(name, dtype), dtype), num_groups=4) for kind in (Whole, InChunks)]
    whole, in_chunks = (case.run(case.attend) for case in cases)
    for expected, found in zip(whole, in_chunks, strict=True):
        assert torch.equal(found, expected)
