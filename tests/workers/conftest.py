"""Fixtures for tests of the workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def triton_kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton kernels run: on a GPU if there is one, else in Triton's interpreter. Seeds torch."""
    torch.manual_seed(7)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):  # tests compute with infinities, of which numpy warns
        yield
