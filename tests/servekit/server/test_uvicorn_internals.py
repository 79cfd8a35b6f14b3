"""What servekit.server.http_protocol relies on in uvicorn and httptools beyond their public interfaces.

pyproject.toml bounds uvicorn's version. Before raising the bound, run this file with the new version: the name of a
test that fails says what has changed, and so which override to check.
"""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http import flow_control
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

METHODS = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "shutdown": [],
    "on_message_begin": [],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "pause_writing": [],
    "resume_writing": [],
    "timeout_keep_alive_handler": [],
    "_start_asgi_task": ["cycle", "app"],
    "_unset_keepalive_if_required": [],
}
PROTOCOL_ATTRIBUTES = [
    "client",
    "connections",
    "cycle",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "server_state",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
]
CYCLE_ATTRIBUTES = [
    "body",
    "chunked_encoding",
    "disconnected",
    "expected_content_length",
    "flow",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "scope",
    "transport",
    "waiting_for_100_continue",
]
PARSER_METHODS = ["feed_data", "get_http_version", "get_method", "set_dangerous_leniencies", "should_upgrade"]


@pytest.fixture
async def protocol() -> HttpToolsProtocol:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    config = uvicorn.Config(app, http="httptools", ws="none", interface="asgi3", lifespan="off", log_config=None)
    config.load()
    return HttpToolsProtocol(config, ServerState(), {}, _loop=None)  # type: ignore[arg-type]


def cycle_of(protocol: HttpToolsProtocol) -> RequestResponseCycle:
    names = list(inspect.signature(RequestResponseCycle).parameters)
    return RequestResponseCycle(**dict.fromkeys(names))


def test_installed_version_is_within_the_bound() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (bound,) = (Requirement(each) for each in project["dependencies"] if each.startswith("uvicorn"))
    assert any(specifier.operator == "<" for specifier in bound.specifier), "pyproject.toml must bound uvicorn"
    assert bound.specifier.contains(version("uvicorn"))


@pytest.mark.parametrize("name", METHODS)
def test_protocol_has_the_method_that_is_overridden_or_called(name: str) -> None:
    assert list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters)[1:] == METHODS[name]


@pytest.mark.parametrize("name", PROTOCOL_ATTRIBUTES)
async def test_protocol_has_the_attribute_that_is_used(name: str, protocol: HttpToolsProtocol) -> None:
    assert hasattr(protocol, name)


@pytest.mark.parametrize("name", CYCLE_ATTRIBUTES)
async def test_request_cycle_has_the_attribute_that_is_used(name: str, protocol: HttpToolsProtocol) -> None:
    assert hasattr(cycle_of(protocol), name)


@pytest.mark.parametrize("name", PARSER_METHODS)
def test_parser_has_the_method_that_is_called(name: str) -> None:
    assert callable(getattr(httptools.HttpRequestParser, name))


def test_flow_control_waits_on_the_event_that_is_replaced() -> None:
    assert "await self._is_writable_event.wait()" in inspect.getsource(flow_control.FlowControl.drain)
    assert callable(flow_control.FlowControl.resume_reading)
    assert "self.write_paused = True" in inspect.getsource(flow_control.FlowControl.pause_writing)
    assert flow_control.HIGH_WATER_LIMIT == 2**16


def test_request_cycle_waits_on_the_event_that_is_replaced() -> None:
    assert "await self.message_event.wait()" in inspect.getsource(RequestResponseCycle.receive)


def test_answer_closes_through_the_cycles_transport_before_it_reports_its_end() -> None:
    """_LingeringTransport depends on this: `close` half-closes, and then on_response_complete sees that."""
    source = inspect.getsource(RequestResponseCycle.send)
    assert (
        "if not self.keep_alive:\n                    self.transport.close()\n                self.on_response()"
        in source
    )


def test_cycle_sets_chunked_encoding_with_the_head_and_writes_parts_as_chunks_unless_the_client_has_left() -> None:
    """_ChunkWriter does the same."""
    source = inspect.getsource(RequestResponseCycle.send)
    assert source.count("self.chunked_encoding = True") == 2
    assert r'content = [b"%x\r\n" % len(body), body, b"\r\n"]' in source
    assert source.index("if self.flow.write_paused") < source.index("if self.disconnected:\n            return")


def test_cycle_uses_no_other_method_of_its_transport() -> None:
    # Not `inspect.getsource`: it parses the module, which fails in Python 3.11 while another thread parses (gh-106905).
    source = Path(inspect.getfile(RequestResponseCycle)).read_text().partition("class RequestResponseCycle")[2]
    used = {part.split("(")[0] for part in source.split("self.transport.")[1:]}
    assert used == {"write", "close", "is_closing"}, "_LingeringTransport has these three"


def test_cycle_without_length_and_chunks_counts_down_from_the_expected_length() -> None:
    """_WithoutChunks depends on this."""
    source = inspect.getsource(RequestResponseCycle.send)
    assert "if self.chunked_encoding is None and self.scope" in source
    assert "self.expected_content_length -= num_bytes" in source


def test_pipelined_requests_wait_in_a_deque_from_the_right() -> None:
    assert "self.pipeline.appendleft((self.cycle, app))" in inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self.pipeline.pop()" in inspect.getsource(HttpToolsProtocol.on_response_complete)


def test_status_lines_are_bytes_by_status() -> None:
    assert STATUS_LINE[404] == b"HTTP/1.1 404 Not Found\r\n"


def test_parser_reports_each_chunk_of_a_body() -> None:
    class Callbacks:
        num_chunks = 0

        def on_chunk_header(self) -> None:
            self.num_chunks += 1

    callbacks = Callbacks()
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    httptools.HttpRequestParser(callbacks).feed_data(head + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
    assert callbacks.num_chunks == 3, "the last one, which is empty, counts, too"


def test_parser_raises_upgrade_with_the_offset_of_what_follows() -> None:
    class Callbacks:
        num_messages = 0

        def on_message_complete(self) -> None:
            self.num_messages += 1

    callbacks = Callbacks()
    data = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc"
    with pytest.raises(httptools.HttpParserUpgrade) as upgrade:
        httptools.HttpRequestParser(callbacks).feed_data(data)
    assert data[upgrade.value.args[0] :] == b"abc" and callbacks.num_messages == 1
