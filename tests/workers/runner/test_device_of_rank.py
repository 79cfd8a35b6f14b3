"""The device of each rank, by what its worker was given. Needs no GPU."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from servekit.protocol.messages import LoadModel
from workers.runner.model_runner import _device_of_rank

LOAD = LoadModel("/model", "auto", "cuda", 16, 1, 1, None, 1, None, 0.9, tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("device", "rank", "local_rank", "expected"),
    [
        ("cuda", 3, None, "cuda:3"),
        ("cuda:2", 1, None, "cuda:3"),
        ("cuda:0,cuda:1,cuda:4,cuda:5", 2, None, "cuda:4"),
        # Of ranks on two machines, those of the second one begin with its first device, too.
        ("cuda", 3, 1, "cuda:1"),
        ("cuda:2", 2, 0, "cuda:2"),
        ("cuda:4,cuda:5", 3, 1, "cuda:5"),
        ("cpu", 3, 1, "cpu"),
    ],
)
def test_each_rank_has_a_device_of_its_machine(device: str, rank: int, local_rank: int | None, expected: str) -> None:
    assert _device_of_rank(replace(LOAD, device=device, rank=rank, local_rank=local_rank)) == expected
