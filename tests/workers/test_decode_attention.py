"""Claims about decode attention on a CPU, against attention in float64 over the same pages."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workers import decode_attention as module
from workers.decode_attention import decode_attention

LENGTHS = [1, 2, 15, 16, 17, 31, 64, 100]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def _anew() -> None:
    decode_attention.cache_clear()


class Case:
    """Rows of different lengths in pages that lie anywhere, among pages that hold others' keys."""

    def __init__(
        self, dtype: torch.dtype, num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 64, block_size: int = 16
    ) -> None:
        torch.manual_seed(3)
        num_rows, most_blocks = len(LENGTHS), -(-max(LENGTHS) // block_size)
        num_blocks = num_rows * most_blocks + 3
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.keys, self.values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        self.block_table = torch.randperm(num_blocks)[: num_rows * most_blocks].view(num_rows, most_blocks).contiguous()
        self.queries = (2 * torch.randn(num_rows + 5, num_heads, head_dim)).to(dtype)  # and those of other rows
        self.token_indices = torch.randperm(num_rows + 5)[:num_rows]
        self.positions = torch.tensor(LENGTHS) - 1
        self.scale = 1.3 / math.sqrt(head_dim)

    def output(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        attend = decode_attention(self.queries.dtype)
        assert attend is not None and attend.takes(self.queries, self.keys, self.values)
        output = torch.full_like(self.queries, 7.0)
        where = (self.token_indices, self.block_table, self.positions)
        attend(self.queries, self.keys, self.values, *where, output, self.scale, window, softcap, sinks)
        others = torch.ones(len(output), dtype=torch.bool)
        others[self.token_indices] = False
        assert (output[others] == 7.0).all(), "it wrote to rows that are not its own"
        return output[self.token_indices]

    def expected(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        rows = []
        for row, length in enumerate(LENGTHS):
            first = max(0, length - window) if window else 0
            group = self.queries.shape[1] // self.keys.shape[2]
            keys, values = (
                pages[self.block_table[row]].flatten(0, 1)[first:length].double().repeat_interleave(group, dim=1)
                for pages in (self.keys, self.values)
            )
            scores = torch.einsum("hd,lhd->hl", self.queries[self.token_indices[row]].double(), keys) * self.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : length - first]
            rows.append(torch.einsum("hl,lhd->hd", weights, values))
        return torch.stack(rows)


def assert_same(output: Tensor, expected: Tensor) -> None:
    distances = (output.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert distances.max() <= TOLERANCES[output.dtype], distances


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 8), (7, 1)])
def test_it_is_attention(dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    case = Case(dtype, *heads, head_dim=head_dim)
    assert_same(case.output(), case.expected())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 100])
def test_pages_may_have_any_size(dtype: torch.dtype, block_size: int) -> None:
    case = Case(dtype, block_size=block_size)
    assert_same(case.output(), case.expected())
    assert_same(case.output(window=20), case.expected(window=20))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [None, 1, 16, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_soft_caps_and_sinks(
    dtype: torch.dtype, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    case = Case(dtype)
    sinks = torch.linspace(-3, 3, 6).to(dtype) if with_sinks else None
    assert_same(case.output(window, softcap, sinks), case.expected(window, softcap, sinks))


def test_a_row_alone_is_shared_by_threads_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: max(2, num_threads))  # which decides into how many parts
    case = Case(torch.float32)
    together = case.output()
    case.token_indices, case.positions = case.token_indices[-1:], case.positions[-1:]
    case.block_table = case.block_table[-1:].contiguous()
    assert torch.equal(case.output(), together[-1:])


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = Case(torch.float32)
    case.queries *= 500
    assert_same(case.output(), case.expected())


def test_heads_that_are_no_whole_vectors_are_not_taken() -> None:
    attend = decode_attention(torch.float32)
    assert attend is not None
    pages = torch.zeros(1, 1, 1, 20)
    assert not attend.takes(torch.zeros(1, 1, 20), pages, pages)
    assert not attend.takes(torch.zeros(1, 1, 32), torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 1, 16))


def test_without_a_compiler_there_is_none_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert decode_attention(torch.float32) is None
    assert "no C compiler (no-such-compiler)" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "FLAGS", ("-fno-such-flag",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert decode_attention(torch.float32) is None
    assert "could not compile" in caplog.text and "no-such-flag" in caplog.text
    assert not list((tmp_path / "servekit").iterdir()), "it left something behind"


def test_it_is_compiled_once_and_only_a_folder_of_our_own_is_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert decode_attention(torch.float32) is not None
    (library,) = (tmp_path / "servekit").iterdir()
    decode_attention.cache_clear()
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: pytest.fail("it was compiled again"))
    assert decode_attention(torch.float32) is not None
    library.parent.chmod(0o777)
    assert module._cache_folder() is None


def test_a_user_without_a_home_has_it_too_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/cache")
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    assert_same((case := Case(torch.float32)).output(), case.expected())
    assert not list(tmp_path.iterdir())
