"""HTTP connections to the server.

A connection has no task, no queue and no timer of its own. The loop calls `data_received`, which stores what came with
its time; reading it can wait until no measurement is in progress. With 17,000 streams in one process, each kilobyte
that a stream needs is 17 MB; at 25,000 events a second, each microsecond is 2.5 % of a core.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

import httptools

from loadtest.record import Outcome
from loadtest.running.address import Address
from loadtest.running.clock import now_s
from loadtest.running.exchange import Exchange

MAX_REFUSAL_BYTES = 2**16
# Servers close idle connections, uvicorn after 5 s. A request sent over a connection that is being closed looks like a
# lost answer; and sending it again, as browsers do, would hide answers that were lost.
MAX_IDLE_S = 2.0

# What some servers send on an idle connection before they close it (RFC 9110, section 15.5.9).
_IDLE_FOR_TOO_LONG = b"HTTP/1.1 408"

_IP_BIND_ADDRESS_NO_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Python names it from 3.12 on

_REMEDIES = {
    errno.EMFILE: "this client has too many open files; raise `ulimit -n` or use more --processes",
    errno.EADDRNOTAVAIL: "no local port is free; use more addresses in --sources or --url",
}


def request_head(path: str, host: str, api_key: str | None, *, keep_alive: bool) -> bytes:
    """Return the request up to the value of Content-Length."""
    key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
    close = "" if keep_alive else "Connection: close\r\n"
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream, application/json\r\n{key}{close}"
        "User-Agent: loadtest\r\nContent-Type: application/json\r\nContent-Length: "
    ).encode()


class Connection(asyncio.Protocol):
    """One connection, for one request at a time. Every failure becomes an outcome of its exchange."""

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
        self._last: Exchange | None = None  # the last exchange, which ended well; while the connection is idle
        self._ends_by_closing = True  # the answer has neither a length nor chunks
        self.address = address
        self.exchange: Exchange | None = exchange
        self.idle_since_s = 0.0
        exchange.connection = self

    # -- connecting ----------------------------------------------------------------------------------------------------

    def connect(self, source: str | None) -> None:
        """Start to connect. Raises OSError for what fails at once."""
        own = socket.socket(self.address.family, socket.SOCK_STREAM)
        try:
            own.setblocking(False)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if source is not None:
                # The port is chosen at connect time, so it has to be unique only among connections to the same server.
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
            self._end(Outcome.UNREACHED, describe_error(OSError(number, os.strerror(number))))
            return
        self._socket = None
        self._pool.attach(self, own)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        exchange = self.exchange
        if exchange is None:  # cancelled meanwhile
            self._pool.release(self)
        else:
            self._send(exchange)

    # -- sending -------------------------------------------------------------------------------------------------------

    def send_over(self, exchange: Exchange) -> None:
        """Send a request over this connection, which is open and idle."""
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
        # Written at once if the kernel accepts it; both parts together, or the server has to read twice.
        self._transport.write(b"%b%d\r\n\r\n%b" % (self._pool.head(self.address), len(exchange.body), exchange.body))
        exchange.body = b""  # nothing is sent twice; this frees a long prompt before its answer ends

    @property
    def is_quiet(self) -> bool:
        """Whether no bytes came that the loop has yet to report, and the connection has not ended.

        The loop reports them in its next turn; a request sent before that would take them for its own answer.
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
                self._pool.on_extra_bytes(last)
            self.abort()  # no request is in progress
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
        # Release first: requests that wait for a connection come before the next one, which `end` may send.
        self._pool.release(self)
        exchange.end(at_s)

    def _end(self, outcome: Outcome, error: str, at_s: float | None = None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None and not exchange.is_ended:
            exchange.end(now_s() if at_s is None else at_s, outcome, error)

    # -- called by the parser ------------------------------------------------------------------------------------------

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
            return  # 100 Continue and the like: the answer follows
        self._is_whole = True
        self.idle_since_s = now_s() if self._pool.keep_alive and self._parser.should_keep_alive() else 0.0

    # -- the end -------------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None  # the parser refers to this object; nothing else breaks that cycle
        self._pool.lost(self)
        exchange = self.exchange
        if exchange is None:
            return
        if exc is None and exchange.status >= 200 and self._ends_by_closing:
            self.exchange = None
            exchange.end(now_s())
            return
        place = "in the middle of" if exchange.received or exchange.first_s else "before"
        self._end(Outcome.CUT, f"{'closed' if exc is None else describe_error(exc)} {place} the answer")

    def abort(self) -> None:
        """Close the connection now, whatever is in progress."""
        if self._socket is not None:
            self._pool.loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._pool.lost(self)
        elif self._transport is not None:
            self._transport.abort()


class Pool:
    """Reusable connections to one server, which may have several addresses."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        addresses: Sequence[Address],
        path: str,
        api_key: str | None = None,
        sources: Sequence[str] = (),
        max_connections: int | None = None,
        on_extra_bytes: Callable[[Exchange], None] = lambda exchange: None,
        *,
        keep_alive: bool = True,
    ) -> None:
        """`on_extra_bytes` is called with an exchange that had ended well if more bytes come before the next request.

        Without `keep_alive` each connection carries one request: some servers close connections without saying so
        before, and a request that is on its way then would be lost.

        `sources` are local addresses to connect from, in turn. Each pair of one of them and a server's address has some
        28,000 ports of its own (net.ipv4.ip_local_port_range).
        """
        assert addresses and (max_connections is None or max_connections > 0)
        self.loop = loop
        self.on_extra_bytes = on_extra_bytes
        self.keep_alive = keep_alive
        self._addresses = addresses
        self._sources: Sequence[str | None] = sources or [None]
        self._heads = {each.host: request_head(path, each.host, api_key, keep_alive=keep_alive) for each in addresses}
        self._max_connections = max_connections
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the most recently used come last
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
        """Send over an idle connection, a new one, or the first that becomes free.

        The exchange ends later, even on an immediate failure.
        """
        if (connection := self._take_idle()) is not None:
            connection.send_over(exchange)
        elif self._max_connections is None or len(self._connections) < self._max_connections:
            self._open(exchange)
        else:
            self._waiting.append(exchange)

    def cancel(self, exchange: Exchange, outcome: Outcome, error: str) -> None:
        """End the exchange now, with this outcome."""
        connection = exchange.connection
        if connection is not None:
            connection.exchange = None
            connection.abort()
        exchange.end(now_s(), outcome, error)

    async def close(self) -> None:
        """Close all connections; nothing may be in progress."""
        self._is_closed = True
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._attaching):
            await task
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    # -- called by connections -----------------------------------------------------------------------------------------

    def attach(self, connection: Connection, own: socket.socket) -> None:
        """Make the loop read from a socket that is connected."""
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
        """Take back a free connection. `idle_since_s` is 0 if it is not to be used again."""
        if not connection.idle_since_s or self._is_closed:
            connection.abort()
        elif self._waiting and not connection.is_quiet:
            pass  # the connection is about to be lost; the waiting request is sent then
        elif (exchange := self._next_waiting()) is not None:
            connection.send_over(exchange)
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
            self.loop.call_soon(self._unreached, connection, exchange, describe_error(error))

    def _unreached(self, connection: Connection, exchange: Exchange, error: str) -> None:
        self.lost(connection)
        if not exchange.is_ended:
            exchange.end(now_s(), Outcome.UNREACHED, error)


def describe_error(error: Exception) -> str:
    """Return one of few distinct texts, so that failures can be counted by it."""
    if not isinstance(error, OSError) or error.errno is None:
        return type(error).__name__
    return _REMEDIES.get(error.errno, os.strerror(error.errno).lower())
