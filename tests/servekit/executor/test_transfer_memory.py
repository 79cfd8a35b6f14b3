"""Claims about the memory for blocks that are handed over: who gets it, that it is given back, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.executor.model_executor import load_model_message
from servekit.executor.transfer_memory import TransferMemory, replica_role
from servekit.protocol.speculative_config import SpeculativeConfig
from servekit.scheduler.kv_connector import ReplicaRole

APART: dict[str, Any] = {"data_parallel_size": 3, "prefill_replicas": 2, "kv_transfer_memory_bytes": 2**20}


def test_each_prefill_replica_writes_to_its_own_and_decode_replicas_read_all() -> None:
    config = ServeConfig(**APART)
    memory = TransferMemory(config)
    assert [os.fstat(fd).st_size for fd in memory.fds] == [2**20, 2**20]
    roles = [replica_role(config, index) for index in range(3)]
    assert roles == [ReplicaRole.PREFILL, ReplicaRole.PREFILL, ReplicaRole.DECODE]
    load = load_model_message(config, "", SpeculativeConfig())
    loads = [memory.apply(load, index, role) for index, role in enumerate(roles)]
    assert {each.kv_transfer_fds for each in loads} == {memory.fds}
    assert [each.kv_transfer_own for each in loads] == [0, 1, None]
    assert not any(map(os.get_inheritable, memory.fds)), "other children must not keep the memory"
    fds = memory.fds
    memory.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_the_ranks_of_a_replica_divide_its_memory() -> None:
    config = ServeConfig(**APART, tensor_parallel_size=2)
    memory = TransferMemory(config)
    assert [os.fstat(fd).st_size for fd in memory.fds] == [2**19] * 4
    memory.close()


def test_workers_that_join_are_asked_for_memory_of_their_own() -> None:
    config = ServeConfig(**{**APART, "data_parallel_size": None}, listen_workers="unix:/tmp/socket")
    memory, load = TransferMemory(config), load_model_message(config, "", SpeculativeConfig())
    assert memory.fds == () and load.kv_transfer_bytes == 2**20
    for other in (ServeConfig(**APART), ServeConfig(listen_workers="unix:/tmp/socket")):
        assert load_model_message(other, "", SpeculativeConfig()).kv_transfer_bytes == 0


def test_without_prefill_replicas_there_is_none() -> None:
    config = ServeConfig(data_parallel_size=2)
    memory, load = TransferMemory(config), load_model_message(config, "", SpeculativeConfig())
    assert memory.fds == () and memory.apply(load, 0, replica_role(config, 0)) is load


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"data_parallel_size": 2, "prefill_replicas": 2}, "leaves no replica for decode: there are 2"),
        ({"data_parallel_size": None}, "leaves no replica for decode: there are 1"),
        ({"data_parallel_size": None, "devices": "cuda:0,cuda:1"}, "leaves no replica for decode: there are 2"),
        ({"enable_prefix_caching": False}, "needs the prefix cache"),
        ({"kv_offload_memory_bytes": 2**20}, "does not work together with --kv-offload-memory-bytes"),
        (
            {"data_parallel_size": None, "devices": "cuda:0,cuda:1,cuda:2,cuda:3", "tensor_parallel_size": 2},
            "leaves no replica for decode: there are 2",
        ),
        ({"listen_workers": "unix:/tmp/socket"}, "or with workers that join, and not with both"),
        ({"placement": "ray", "data_parallel_size": 2}, "leaves no replica for decode: there are 2"),
    ],
)
def test_settings_with_which_nothing_can_be_handed_over_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TransferMemory(ServeConfig(**{**APART, **settings}))
