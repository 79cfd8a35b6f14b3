"""Let ranks on several machines find each other: through a store of torch, which rank 0 has at an address of its own.

Nothing here is authenticated: torch's store answers everyone who can connect to it, and so do gloo and NCCL. So the
store listens at the given address only, and ranks exchange tensors through the interface of that network only.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import re
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public

from servekit.errors import ConfigError, WorkerLost

# To connect to the store. The ranks start at the same time, but a slow disk may take a minute to load torch.
CONNECT_TIMEOUT_S = 300.0
GRACE_S = 5.0  # after which torch itself should have given up
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915  # of linux/sockios.h: the IPv4 address of an interface

_RENDEZVOUS = re.compile(r"tcp://(?:\[(?P<ipv6>[^\]/]+)\]|(?P<host>[^:/]+)):(?P<port>\d+)/(?P<name>\w+)")


class TcpRendezvous:
    """The store of a group, as `LoadModel.rendezvous` names it: `tcp://HOST:PORT/NAME`."""

    def __init__(self, text: str) -> None:
        found = _RENDEZVOUS.fullmatch(text)
        assert found is not None, "checked where the address was read"
        self.host, self.port = str(found["ipv6"] or found["host"]), int(found["port"])
        self._name = found["name"]

    def open_store(self, rank: int, timeout_s: float) -> Store:
        """Connect to the store; rank 0 first makes it. `timeout_s` is the limit of every wait for another rank.

        The names in it begin with the group's, so a rank that is left of an earlier group cannot disturb this one.
        Raises ConfigError if rank 0 cannot have this address, and WorkerLost if another try may help.
        """
        listener = None if rank else self._listen()
        connect_s = min(timeout_s, CONNECT_TIMEOUT_S)

        def connect() -> TCPStore:
            return TCPStore(
                self.host,
                self.port,
                None,
                listener is not None,
                timedelta(seconds=connect_s),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
            )

        try:
            store = _within(connect_s + GRACE_S, connect)
        except TimeoutError:
            raise WorkerLost(
                f"rank {rank} cannot connect to rank 0 at {self.host}, port {self.port}: something listens there, and "
                "does not answer; if another program uses it, choose another --master-port"
            ) from None
        except dist.DistError as error:
            what = str(error).partition("\n")[0]
            raise WorkerLost(
                f"rank {rank} cannot connect to rank 0 at {self.host}, port {self.port}: {what}; can this machine "
                "reach --master-addr and --master-port of node rank 0?"
            ) from error
        store.set_timeout(timedelta(seconds=timeout_s))
        return PrefixStore(self._name, store)

    def interface(self) -> str:
        """Return the name of this machine's network interface towards rank 0. Raises ConfigError."""
        try:
            family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)  # sends nothing: it only chooses the interface
                own = probe.getsockname()[0]
        except OSError as error:
            raise ConfigError(f"there is no way to --master-addr {self.host} from here: {error.strerror}") from None
        for _, name in socket.if_nameindex():
            if own in _addresses(name):
                return name
        raise ConfigError(
            f"no network interface has {own} as its first address, from which this machine reaches --master-addr "
            f"{self.host}; name the interface with the variables GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )

    def _listen(self) -> socket.socket:
        """Return a socket that listens at the address, and at no other. Raises ConfigError or WorkerLost."""
        try:
            family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family)
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (")[0]  # Python repeats the address
            what = f"rank 0 cannot listen at {self.host}, port {self.port} ({why})"
            if error.errno == errno.EADDRINUSE:  # perhaps by a process that ends now
                raise WorkerLost(f"{what}; if another program uses it, choose another --master-port") from None
            raise ConfigError(f"{what}: --master-addr must be an address of node rank 0") from None


def _within(limit_s: float, connect: Callable[[], TCPStore]) -> TCPStore:
    """Return what `connect` returns, and raise what it raises. Raises TimeoutError after the limit.

    torch's store limits the time to connect. But it waits without a limit for the first answer of what it has connected
    to, and that may be another program. The thread that waits is left behind; this process ends soon.
    """
    found: list[TCPStore] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(connect())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="connects to the store")
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError
    return found[0]


def _addresses(interface: str) -> set[str]:
    """Return the IPv6 addresses and the first IPv4 address of an interface."""
    found = set()
    if IPV6_ADDRESSES.exists():
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.add(str(ipaddress.IPv6Address(int(digits, 16))))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.add(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has none
            pass
    return found
