"""Connections to the server, and one request with its answer over one of them.

There is no task, no queue and no timer for a connection: the loop calls `data_received`, and what came is put aside
with the time at which it came. Reading it can wait until nobody's time is measured. With 17,000 streams in a process
each kilobyte that one needs is 17 MB, and with 25,000 events a second each microsecond is 2.5 % of a core.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from loadtest.clock import now_s
from loadtest.errors import LoadTestError
from loadtest.record import Outcome

# Bytes of a stream that wait to be read, at most: some sixty events.
MAX_PENDING_BYTES = 2**13
MAX_REFUSAL_BYTES = 2**16
# Servers close connections that nothing is asked on, uvicorn after 5 s. Asking over one that is being closed looks like
# an answer that was lost; and asking again, as browsers do, would hide answers that were.
MAX_IDLE_S = 2.0

# What some servers say to a connection on which nothing is asked, before they close it (RFC 9110, section 15.5.9).
_IDLE_FOR_TOO_LONG = b"HTTP/1.1 408"

_IP_BIND_ADDRESS_NO_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Python names it from 3.12 on

_ADVICE = {
    errno.EMFILE: "too many open files of this client; raise `ulimit -n` or use more processes",
    errno.EADDRNOTAVAIL: "no local port is left; use more addresses to come from, or to go to",
}


class Address(NamedTuple):
    """Where a server is."""

    family: int
    socket_address: tuple[str, int]
    host: str  # for the header


def resolve(url: str) -> list[Address]:
    """The addresses of a URL without a path, the preferred one first. Raises LoadTestError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise LoadTestError(f"{url!r} is not an address of a server; write http://HOST:PORT, with no TLS and no path")
    try:
        port = parts.port or 80
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise LoadTestError(f"the address {url!r} cannot be resolved: {error}; check its name and port") from None
    return [Address(int(family), at[:2], parts.netloc) for family, _, _, _, at in found if isinstance(at[0], str)]


def check_sources(sources: Sequence[str], addresses: Sequence[Address]) -> None:
    """Raises LoadTestError for what is no address of this machine, or of another family than a server's. In a run the
    same error number would say that an address has no port left."""
    for source in sources:
        for family in {address.family for address in addresses}:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    socket.inet_pton(family, source)
                    probe.bind((source, 0))
                except OSError as error:
                    kind = "IPv6" if family == socket.AF_INET6 else "IPv4"
                    why = f"an {kind} address" if error.errno is None else f"of this machine: {error.strerror}"
                    raise LoadTestError(
                        f"--sources {source}: this is no address to come from, for it is not {why}; name local {kind} "
                        "addresses, such as 127.0.0.2 to a server at 127.0.0.1"
                    ) from None


def request_head(path: str, host: str, api_key: str | None) -> bytes:
    """Up to where the body's length stands."""
    key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream, application/json\r\n{key}"
        "User-Agent: loadtest\r\nContent-Type: application/json\r\nContent-Length: "
    ).encode()


class Exchange:
    """One request, and what came back. Subclasses are told: at the first byte of a stream, when much waits to be read,
    and once at the end, when `outcome` is set: None is a whole answer over HTTP, whatever it says."""

    __slots__ = (
        "body",
        "connection",
        "ended_s",
        "ends",
        "error",
        "first_s",
        "full_at",
        "is_ended",
        "is_stream",
        "outcome",
        "queue_s",
        "received",
        "started_s",
        "status",
        "times_s",
    )

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.connection: Connection | None = None
        self.started_s = 0.0  # when its connection was begun, or over an open one, when its first byte was sent
        self.first_s = 0.0
        self.ended_s = 0.0
        self.status = 0
        self.is_stream = False
        self.queue_s: float | None = None  # TGI's header
        self.received = bytearray()  # of the answer's body, and not read yet
        self.ends = array("L")  # after each piece that came: how much of it there was
        self.times_s = array("d")  # and when
        self.full_at = MAX_PENDING_BYTES
        self.is_ended = False
        self.outcome: Outcome | None = None
        self.error = ""

    def on_first(self) -> None:
        """The first bytes of a stream came, at `first_s`."""

    def on_full(self) -> None:
        """Much came: `full_at` bytes. Whoever reads it says so with `forget`."""

    def on_end(self) -> None:
        """All is known. Must not raise."""

    def forget(self, num_bytes: int) -> None:
        """Those were read; what is left is no whole event, so the times at which it came are of no interest."""
        del self.received[:num_bytes]
        del self.ends[:], self.times_s[:]
        self.full_at = len(self.received) + MAX_PENDING_BYTES

    def arrived(self, at_s: float) -> None:
        """There may be more of a stream than before."""
        size = len(self.received)
        if not size or (self.ends and self.ends[-1] == size):
            return
        self.ends.append(size)
        self.times_s.append(at_s)
        if not self.first_s:
            self.first_s = at_s
            self.on_first()
        if size >= self.full_at:
            self.on_full()

    def end(self, at_s: float, outcome: Outcome | None = None, error: str = "") -> None:
        assert not self.is_ended
        self.is_ended = True
        self.connection = None
        self.body = b""
        self.ended_s, self.outcome, self.error = at_s, outcome, error
        self.on_end()


class Connection(asyncio.Protocol):
    """One connection, for one request at a time. Whatever happens becomes an outcome of its exchange."""

    __slots__ = (
        "_ends_by_closing",
        "_is_whole",
        "_last",
        "_parser",
        "_pool",
        "_socket",
        "_transport",
        "address",
        "exchange",
        "idle_since_s",
    )

    def __init__(self, pool: Pool, address: Address, exchange: Exchange) -> None:
        self._pool = pool
        self._socket: socket.socket | None = None  # while connecting
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._is_whole = False
        self._last: Exchange | None = None  # that ended well, while the connection is idle
        self._ends_by_closing = True  # the answer has neither a length nor chunks
        self.address = address
        self.exchange: Exchange | None = exchange
        self.idle_since_s = 0.0
        exchange.connection = self

    # -- connecting ----------------------------------------------------------------------------------------------------

    def connect(self, source: str | None) -> None:
        """Begin to. Raises OSError for what fails at once."""
        own = socket.socket(self.address.family, socket.SOCK_STREAM)
        try:
            own.setblocking(False)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if source is not None:
                # The port is chosen when connecting, so that it need only differ among those to the same server.
                own.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                own.bind((source, 0))
            if (number := own.connect_ex(self.address.socket_address)) not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
        except BaseException:
            own.close()
            raise
        self._socket = own
        self._pool.loop.add_writer(own.fileno(), self._writable)

    def _writable(self) -> None:
        own = self._socket
        assert own is not None
        self._pool.loop.remove_writer(own.fileno())
        if number := own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            own.close()
            self._socket = None
            self._pool.lost(self)
            self._end(Outcome.UNREACHED, _told(OSError(number, os.strerror(number))))
            return
        self._socket = None
        self._pool.attach(self, own)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        exchange = self.exchange
        if exchange is None:  # it was given up meanwhile
            self._pool.release(self)
        else:
            self._send(exchange)

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(self, exchange: Exchange) -> None:
        """Over a connection that is open and idle."""
        assert self.exchange is None and self._transport is not None
        self._last = None
        self.exchange = exchange
        exchange.connection = self
        exchange.started_s = now_s()
        self._send(exchange)

    def _send(self, exchange: Exchange) -> None:
        assert self._transport is not None
        self._is_whole = False
        self._ends_by_closing = True
        # At once, if the kernel takes it; both parts together, or the server reads twice.
        self._transport.write(b"%b%d\r\n\r\n%b" % (self._pool.head(self.address), len(exchange.body), exchange.body))
        exchange.body = b""  # nothing is sent twice, and a long prompt would be held as long as its answer

    @property
    def is_quiet(self) -> bool:
        """Whether nothing came of which the loop has yet to tell: bytes that belong to no answer, or the end.

        It will tell in its next turn; whoever asked before would take those bytes for his own answer.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def data_received(self, data: bytes) -> None:
        now = now_s()
        exchange, parser = self.exchange, self._parser
        if exchange is None or parser is None:
            last, self._last = self._last, None
            if last is not None and not data.startswith(_IDLE_FOR_TOO_LONG):
                self._pool.on_more(last)
            self.abort()  # nothing was asked
            return
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort()
            self._end(Outcome.GARBLED, f"not HTTP/1.1: {error}"[:120], now)
            return
        if exchange.is_stream:
            exchange.arrived(now)
        if self._is_whole:
            self._finish(now)

    def _finish(self, at_s: float) -> None:
        exchange = self.exchange
        assert exchange is not None
        self.exchange = None
        self._last = exchange
        # First those who wait for a connection: whoever asks next at this end comes after them.
        self._pool.release(self)
        exchange.end(at_s)

    def _end(self, outcome: Outcome, error: str, at_s: float | None = None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None and not exchange.is_ended:
            exchange.end(now_s() if at_s is None else at_s, outcome, error)

    # -- what the parser tells -----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            if self.exchange is not None:
                self.exchange.is_stream = value.lower().startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._ends_by_closing = False
        elif name == b"x-queue-time" and self.exchange is not None and value.isdigit():
            self.exchange.queue_s = int(value) / 1e3

    def on_headers_complete(self) -> None:
        assert self._parser is not None and self.exchange is not None
        if self._is_whole:
            raise ValueError("a second answer to one request")
        self.exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        assert exchange is not None
        if exchange.status == 200 or len(exchange.received) < MAX_REFUSAL_BYTES:
            exchange.received += body

    def on_message_complete(self) -> None:
        assert self._parser is not None and self.exchange is not None
        if self.exchange.status < 200:
            return  # 100 Continue and its like: the answer follows
        self._is_whole = True
        self.idle_since_s = now_s() if self._parser.should_keep_alive() else 0.0

    # -- the end -------------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None  # the parser refers to this object, and nothing else ends that circle
        self._pool.lost(self)
        exchange = self.exchange
        if exchange is None:
            return
        if exc is None and exchange.status >= 200 and self._ends_by_closing:
            self.exchange = None
            exchange.end(now_s())
            return
        place = "in the middle of" if exchange.received or exchange.first_s else "before"
        self._end(Outcome.CUT, f"{'closed' if exc is None else _told(exc)} {place} the answer")

    def abort(self) -> None:
        """Close it now, whatever is under way."""
        if self._socket is not None:
            self._pool.loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._pool.lost(self)
        elif self._transport is not None:
            self._transport.abort()


class Pool:
    """Connections to one server, which may be at several addresses, kept while they are of use."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        addresses: Sequence[Address],
        path: str,
        api_key: str | None = None,
        sources: Sequence[str] = (),
        max_connections: int | None = None,
        on_more: Callable[[Exchange], None] = lambda exchange: None,
    ) -> None:
        """`on_more` is told of an exchange that had ended well when more bytes came, and nothing else had been asked.
        `sources` are local addresses to come from, in turn: each pair of one and a server's address has some 28,000
        ports of its own (net.ipv4.ip_local_port_range)."""
        assert addresses and (max_connections is None or max_connections > 0)
        self.loop = loop
        self.on_more = on_more
        self._addresses = addresses
        self._sources: Sequence[str | None] = sources or [None]
        self._heads = {each.host: request_head(path, each.host, api_key) for each in addresses}
        self._max_connections = max_connections
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # those used last are the last ones
        self._waiting: deque[Exchange] = deque()
        self._num_opened = 0
        self._attaching: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def head(self, address: Address) -> bytes:
        return self._heads[address.host]

    def send(self, exchange: Exchange) -> None:
        """Over an idle connection, a new one, or whichever is free first. It ends later, even if it fails at once."""
        if (connection := self._take_idle()) is not None:
            connection.ask(exchange)
        elif self._max_connections is None or len(self._connections) < self._max_connections:
            self._open(exchange)
        else:
            self._waiting.append(exchange)

    def give_up(self, exchange: Exchange, outcome: Outcome, error: str) -> None:
        """Its time is over."""
        connection = exchange.connection
        if connection is not None:
            connection.exchange = None
            connection.abort()
        exchange.end(now_s(), outcome, error)

    async def close(self) -> None:
        """All of them; nothing may be under way."""
        self._is_closed = True
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._attaching):
            await task
        await asyncio.sleep(0)  # transports close in the loop's next turn

    # -- for connections -----------------------------------------------------------------------------------------------

    def attach(self, connection: Connection, own: socket.socket) -> None:
        """Its socket is connected: the loop is to read from it."""
        task = self.loop.create_task(self._attach(connection, own))
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _attach(self, connection: Connection, own: socket.socket) -> None:
        try:
            await self.loop.create_connection(lambda: connection, sock=own)
        except OSError as error:
            connection.connection_lost(error)
        else:
            if self._is_closed:
                connection.abort()

    def release(self, connection: Connection) -> None:
        """It is free. `idle_since_s` of one that the server is about to close is 0."""
        if not connection.idle_since_s or self._is_closed:
            connection.abort()
        elif self._waiting and not connection.is_quiet:
            pass  # it is about to be lost, and who waits is served then
        elif (exchange := self._next_waiting()) is not None:
            connection.ask(exchange)
        else:
            self._idle[connection] = None

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)
        if not self._is_closed and (exchange := self._next_waiting()) is not None:
            self._open(exchange)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if now_s() - connection.idle_since_s > MAX_IDLE_S:
                for old in (connection, *self._idle):  # the others have been idle for longer
                    old.abort()
                self._idle.clear()
            elif connection.is_quiet:
                return connection
        return None

    def _next_waiting(self) -> Exchange | None:
        while self._waiting:
            exchange = self._waiting.popleft()
            if not exchange.is_ended:
                return exchange
        return None

    def _open(self, exchange: Exchange) -> None:
        around, place = divmod(self._num_opened, len(self._addresses))
        self._num_opened += 1
        connection = Connection(self, self._addresses[place], exchange)
        self._connections.add(connection)
        exchange.started_s = now_s()
        try:
            connection.connect(self._sources[around % len(self._sources)])
        except OSError as error:
            self.loop.call_soon(self._unreached, connection, exchange, _told(error))

    def _unreached(self, connection: Connection, exchange: Exchange, error: str) -> None:
        self.lost(connection)
        if not exchange.is_ended:
            exchange.end(now_s(), Outcome.UNREACHED, error)


def _told(error: Exception) -> str:
    """In few different words."""
    if not isinstance(error, OSError) or error.errno is None:
        return type(error).__name__
    return _ADVICE.get(error.errno, os.strerror(error.errno).lower())
