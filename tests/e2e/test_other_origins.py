"""CORS in a browser: for a page of another origin it asks first, and shows the answer only if the origin is allowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import chromium
from tests.support.server_process import ServerProcess, serving

KEY = "secret"
# What OpenAI's client sends from a page: headers that make the browser ask the server before the request.
ASK = """async ([url, key]) => {
    const response = await fetch(url + "/v1/chat/completions", {
        method: "POST",
        headers: {"authorization": "Bearer " + key, "content-type": "application/json", "x-stainless-lang": "js"},
        body: JSON.stringify({messages: [{role: "user", content: "a b c"}], max_tokens: 4, stream: true}),
    });
    return [response.status, response.headers.get("x-request-id"), await response.text()];
}"""


class EmptyPage(BaseHTTPRequestHandler):
    """A web server with an empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><link rel=icon href=data:,>")

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of the pages. By its two names, localhost and 127.0.0.1, it has two origins."""
    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage) as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        yield pages.server_port
        pages.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("sim:step=1ms", "--cors-origins", f"http://localhost:{port}", "--api-key", KEY)
    with serving(*flags, log=tmp_path_factory.mktemp("origins") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def page_at(browser: Browser, origin: str) -> Page:
    page = browser.new_page()
    page.goto(origin)
    return page


def test_a_page_of_an_allowed_origin_streams_a_chat(server: ServerProcess, browser: Browser, port: int) -> None:
    page = page_at(browser, f"http://localhost:{port}")
    status, request_id, text = page.evaluate(ASK, [server.url, KEY])
    assert status == 200 and request_id and text.rstrip().endswith("data: [DONE]")
    status, _, text = page.evaluate(ASK, [server.url, "wrong"])
    assert status == 401 and "invalid_api_key" in text, "the page can read why"
    server.wait_for_log("method=OPTIONS path=/v1/chat/completions status=200")


def test_a_page_of_another_origin_reads_nothing(server: ServerProcess, browser: Browser, port: int) -> None:
    page = page_at(browser, f"http://127.0.0.1:{port}")
    answer = page.evaluate(f"args => ({ASK})(args).then(String, String)", [server.url, KEY])
    assert answer == "TypeError: Failed to fetch"
    server.wait_for_log("method=OPTIONS path=/v1/chat/completions status=400")
