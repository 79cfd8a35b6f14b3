"""The claim: ranks meet at the address that they were given, and nothing listens at any other."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from servekit.errors import ConfigError, WorkerLost
from workers.parallel import rendezvous
from workers.parallel.ranks import Ranks
from workers.parallel.rendezvous import TcpRendezvous

NAME = "0123456789abcdef"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def addresses_with(port: int) -> set[str]:
    """The local addresses, as the kernel writes them, at which something listens with this port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")}


def test_the_store_listens_at_the_given_address_only_and_groups_do_not_see_each_other() -> None:
    port = free_port()
    first = TcpRendezvous(f"tcp://127.0.0.1:{port}/{NAME}").open_store(0, 30.0)
    assert addresses_with(port) == {"0100007F"}
    second = TcpRendezvous(f"tcp://localhost:{port}/{NAME}").open_store(1, 30.0)
    other = TcpRendezvous(f"tcp://127.0.0.1:{port}/another").open_store(1, 30.0)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert second.check(["key"]) and not other.check(["key"])


def test_an_address_of_another_machine_is_refused_and_a_used_port_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        """As the kernel does, where it is not told to bind addresses that are not its own."""
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    expected = r"rank 0 cannot listen at 198\.51\.100\.7, .*Cannot assign.* an address of node rank 0"
    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_server", refuse)
        with pytest.raises(ConfigError, match=expected):
            TcpRendezvous(f"tcp://198.51.100.7:29500/{NAME}").open_store(0, 30.0)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(WorkerLost, match=r"Address already in use\); .* choose another --master-port"):
            TcpRendezvous(f"tcp://127.0.0.1:{port}/{NAME}").open_store(0, 30.0)


def test_a_rank_that_cannot_reach_the_store_says_which_address_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT_S", 1.0)
    with pytest.raises(WorkerLost, match=r"rank 1 cannot connect to rank 0 at 127\.0\.0\.1, port \d+"):
        TcpRendezvous(f"tcp://127.0.0.1:{free_port()}/{NAME}").open_store(1, 30.0)


def test_a_program_that_listens_in_the_place_of_the_store_and_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"tcp://127.0.0.1:{silent.getsockname()[1]}/{NAME}"
        with pytest.raises(WorkerLost, match=r"rank 1 .* something listens there, and does not answer"):
            TcpRendezvous(where).open_store(1, 0.5)
    for thread in threading.enumerate():
        if thread.name == "connects to the store":  # it would end this process if Python ended before it
            thread.join(60.0)
            assert not thread.is_alive()


def test_ranks_that_cannot_be_connected_say_where_and_whether_another_try_may_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(TcpRendezvous, "open_store", lambda *_: dist.HashStore())
    for library in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "")  # so that what Ranks sets is undone, too
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME")
    with pytest.raises(ConfigError, match=r"rank 1 of 2 .* over the interface lo: no device; is this interface up\?"):
        Ranks(1, 2, 1, str(tmp_path / "rendezvous"), torch.device("cpu"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(
        WorkerLost, match=r"the interface eth7: no device; rank 0 is at 127\.0\.0\.1, port 29500, .*TCP"
    ):
        Ranks(1, 2, 1, f"tcp://127.0.0.1:29500/{NAME}", torch.device("cpu"))


def test_tensors_go_through_the_interface_of_the_given_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TcpRendezvous(f"tcp://127.0.0.1:1/{NAME}").interface() == "lo"
    assert TcpRendezvous(f"tcp://localhost:1/{NAME}").interface() == "lo"
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        assert TcpRendezvous(f"tcp://[::1]:1/{NAME}").interface() == "lo"

    def fail(*_: object, **__: object) -> None:
        """As where no server of names answers for names that are not there."""
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match=r"there is no way to --master-addr nowhere\.invalid from here"):
        TcpRendezvous(f"tcp://nowhere.invalid:1/{NAME}").interface()


def test_an_interface_that_is_not_found_is_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_addresses", lambda _: set())
    with pytest.raises(ConfigError, match="name the interface with the variables GLOO_SOCKET_IFNAME"):
        TcpRendezvous(f"tcp://127.0.0.1:1/{NAME}").interface()


@pytest.mark.parametrize("is_named", [False, True])
def test_two_ranks_add_up_through_a_store(is_named: bool) -> None:
    """Also where no interface is found, if the operator names it."""
    program = (
        "import sys, torch\n"
        "from workers.parallel import rendezvous\n"
        f"rendezvous._addresses = (lambda _: set()) if {is_named} else rendezvous._addresses\n"
        "from workers.parallel.ranks import Ranks\n"
        "rank = int(sys.argv[1])\n"
        "ranks = Ranks(rank, 2, 1, sys.argv[2], torch.device('cpu'), 60.0)\n"
        "assert ranks.group.total(rank + 1) == 3\n"
        "torch.distributed.destroy_process_group()\n"  # or its threads may still run at the end, which is an abort
    )
    where = f"tcp://127.0.0.1:{free_port()}/{NAME}"
    named = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if is_named else {}
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), where], env={**os.environ, **named})
        for rank in (1, 0)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
