"""Hold the memory of a worker that joined for KV blocks that are handed over, and carry blocks to and from others.

The worker and its agent map the same memory, as the workers of one machine do: an *outbox*, which the worker writes to
and from which other agents fetch, and an *inbox*, which the agent fills and the worker loads from. So all that depends
on the network is in the agent, and no step of the worker waits for it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable

from msgspec.structs import replace

from servekit.errors import ConfigError
from servekit.joining.address import TcpAddress
from servekit.joining.block_sender import BlockSender
from servekit.joining.nixl_transfer import NixlFailed, NixlReaders, NixlSource, has_nixl
from servekit.joining.rank_receivers import RankReceivers
from servekit.joining.transfer_log import TransferLog
from servekit.joining.transfer_settings import TransferSettings
from servekit.protocol.block_ring import BlockRing, open_memory
from servekit.protocol.kv_transfer import transfer_key
from servekit.protocol.messages import BlocksFetched, FetchBlocks, LoadModel

OUTBOX, INBOX = 0, 1


class BlockExchange:
    """The memory of one worker, and both ends of its transfers. Call it on the event loop's thread."""

    def __init__(
        self,
        load: LoadModel,
        key: bytes,
        settings: TransferSettings,
        tls: ssl.SSLContext | None,
        on_fetched: Callable[[BlocksFetched], None],
    ) -> None:
        """Reserve the memory that `load` asks for. `tls` is for fetching from others that use it.

        `on_fetched` is called in other threads. Raises ConfigError.
        """
        self._key = transfer_key(key, load.kv_transfer_group)
        self._settings = settings
        self._tls = tls
        self._on_fetched = on_fetched
        self._num_ranks = 1 if load.local_rank is not None else load.num_ranks  # on this machine, of this agent
        self._source: NixlSource | None = None
        self._readers: NixlReaders | None = None
        self._sender: BlockSender | None = None
        self._receiver: RankReceivers | None = None
        self._warn = TransferLog().warning
        names = (f"{name}-{rank}" for name in ("outbox", "inbox") for rank in range(self._num_ranks))
        try:  # those of the outbox, one for each rank, and then those of the inbox
            self.fds = open_memory(names, load.kv_transfer_bytes // load.num_ranks)
        except OSError as error:
            raise ConfigError(
                f"{load.kv_transfer_bytes:,} bytes for handed-over KV blocks (--kv-transfer-memory-bytes of the "
                f"server) cannot be reserved: {error.strerror}"
            ) from None
        if settings.uses_nixl:  # its processes start while the worker loads the model
            self._start_nixl()

    def apply(self, load: LoadModel) -> LoadModel:
        """Return the message that loads the model in a worker with this memory."""
        return replace(load, kv_transfer_fds=self.fds, kv_transfer_own=OUTBOX, kv_transfer_inbox=INBOX)

    def open(self) -> str:
        """Begin to transfer blocks, when the worker has laid out the memory. Returns the address for other agents.

        Raises ConfigError if it cannot listen there, or cannot map the memory.
        """
        try:
            rings = [
                [
                    BlockRing.attach(fd, is_writer)
                    for fd in self.fds[box * self._num_ranks : (box + 1) * self._num_ranks]
                ]
                for box, is_writer in ((OUTBOX, False), (INBOX, True))
            ]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the memory for handed-over KV blocks cannot be mapped: {_what(error)}; give this process more "
                "memory, or lower --kv-transfer-memory-bytes of the server"
            ) from None
        settings = self._settings
        try:
            address = settings.host, settings.port
            self._sender = BlockSender(rings[OUTBOX], self._key, address, settings.server_tls, self._source)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for transfers of KV blocks at {settings.host} port {settings.port}: "
                f"{_what(error)}; name another address of this machine with --transfer-address"
            ) from None
        except RuntimeError as error:
            raise ConfigError(
                f"no thread can be started that listens for transfers of KV blocks: {error}; raise the limit of "
                "processes for this user or container"
            ) from None
        self._receiver = RankReceivers(rings[INBOX], self._key, self._tls, self._on_fetched, self._readers)
        address_of_others = str(TcpAddress(settings.host, self._sender.port))
        return address_of_others if settings.server_tls is None else address_of_others.replace("tcp:", "tls:", 1)

    def _start_nixl(self) -> None:
        """Start the processes of NIXL. If that fails, blocks go over TCP, and the log says why."""
        why = "it is not installed (pip install 'servekit[nixl]')"
        if has_nixl():
            try:
                self._readers = NixlReaders()
                self._source = NixlSource(self.fds[: self._num_ranks])
                return
            except NixlFailed as error:
                why = str(error)
                if self._readers is not None:
                    self._readers.close()
                    self._readers = None
        self._warn(f"KV blocks go over TCP, because NIXL (--transfer-backend nixl) cannot be used: {why}")

    def fetch(self, request: FetchBlocks) -> None:
        """Begin to fetch blocks. Does not wait."""
        if self._receiver is None:
            self._warn(f"KV blocks are not fetched from {request.addresses[0]}: this worker is not ready")
            self._on_fetched(BlocksFetched(request.number))
        else:
            self._receiver.fetch(request)

    def close(self) -> None:
        """End the transfers, and give the memory back."""
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
        for nixl in (self._source, self._readers):
            if nixl is not None:
                nixl.close()
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


def _what(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
