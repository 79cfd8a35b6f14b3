"""Take the pictures of the console: docs/console-light.webp and docs/console-dark.webp.

    python -m scripts.screenshot

Everything in the pictures happens: a server with a simulated model, clients that send short and long prompts one after
another, and sixteen copies of a prompt that the page itself requests. Only the device is simulated, so the answers are
not words (docs/simulated_model.md).
"""

from __future__ import annotations

import base64
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Literal

import httpx2
from playwright.sync_api import Browser, Page

from tests.support.browser import TIMEOUT_MS, chromium
from tests.support.server_process import ServerProcess, serving

DOCS = Path(__file__).parents[1] / "docs"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTH, HEIGHT = 1600, 1000
MAX_BYTES = 120_000  # of a picture

MODEL = "sim:step=18ms,decode=150us,prefill=35us"
SETTINGS = ("--num-kv-blocks", "3600", "--max-num-seqs", "40", "--log-level", "warning")
# Half of the prompts begin with it, so the prefix cache has it.
PREAMBLE = "You answer what is asked, and nothing else. " * 60
# (number of clients, prompt tokens, answer tokens). A client sends one request after another, each a little different.
LOAD = ((9, 120, 320), (4, 900, 200), (4, 7600, 40))

# True when the page's own sixteen sequences stream and a long prompt is in prefill. Then the page draws no more,
# because that state is over before the picture is taken.
IS_GOOD = """() => {
    const rows = [...document.querySelectorAll("#scheduler-view .sequences button:not([hidden])")];
    const stateOf = (row) => row.querySelector(".state").textContent;
    const numbers = (row) => parseInt(row.querySelector(".numbers").textContent);
    const streams = rows.filter((row) => row.matches(".own") && stateOf(row) === "decode" && numbers(row) > 60);
    const bottom = document.querySelector("#scheduler-view .sequences").getBoundingClientRect().bottom;
    const visible = rows.filter((row) => row.getBoundingClientRect().bottom < bottom);
    const prefills = visible.filter((row) => stateOf(row) === "prefill" && row.textContent.includes("/7,600"));
    if (streams.length < 16 || !prefills.length) return false;
    window.draw = window.requestAnimationFrame;
    window.requestAnimationFrame = () => undefined;
    return true;
}"""
DRAW_ON = "() => { window.requestAnimationFrame = window.draw; }"
TO_WEBP = """async ([png, quality]) => {
    const image = new Image();
    image.src = "data:image/png;base64," + png;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height);
    canvas.getContext("2d").drawImage(image, 0, 0);
    const blob = await canvas.convertToBlob({ type: "image/webp", quality });
    const reader = new FileReader();
    await new Promise((done) => { reader.onload = done; reader.readAsDataURL(blob); });
    return reader.result.split(",")[1];
}"""


def send_requests(server: ServerProcess, client: int, prompt_length: int, max_tokens: int, stop: Event) -> None:
    number = 0
    with httpx2.Client(base_url=server.url, timeout=120) as connection, suppress(httpx2.TransportError):
        while not stop.is_set():
            start = PREAMBLE if client % 2 else f"Client {client} begins in its own words. "
            prompt = (start + f"And now for question {number} of client {client}: " * prompt_length)[:prompt_length]
            body = {"prompt": prompt, "max_tokens": max_tokens + 17 * ((client + number) % 9)}
            connection.post("/v1/completions", json=body)
            number += 1


@contextmanager
def busy_server() -> Iterator[ServerProcess]:
    """A server with clients, which stop when their connections end."""
    num_clients = sum(clients for clients, _, _ in LOAD)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_clients) as threads, ExitStack() as stack:
        server = stack.enter_context(serving("--model", MODEL, *SETTINGS, log=Path(folder) / "log"))
        stop = Event()
        stack.callback(stop.set)
        for clients, prompt_length, max_tokens in LOAD:
            for client in range(clients):
                threads.submit(send_requests, server, client, prompt_length, max_tokens, stop)
        yield server


def send_copies(page: Page) -> None:
    page.locator('[name="n"]').fill("16")
    page.locator('[name="max_tokens"]').fill("600")
    page.get_by_role("button", name="Send").click()


def as_webp(browser: Browser, png: bytes) -> bytes:
    """Encode with the highest quality that is small enough. Chromium does it, so no package is needed."""
    page = browser.new_page()
    for quality in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        webp = base64.b64decode(page.evaluate(TO_WEBP, [base64.b64encode(png).decode(), quality]))
        if len(webp) <= MAX_BYTES:
            page.close()
            return webp
    raise AssertionError(f"the picture has {len(webp):,} bytes, and the limit is {MAX_BYTES:,}; show less in it")


def main() -> None:
    with busy_server() as server, chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(server.url)
        while server.client.get("/ui/state").json().get("num_steps", 0) < 160:  # most of the 200 in the picture
            time.sleep(0.1)
        send_copies(page)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(IS_GOOD, timeout=4 * TIMEOUT_MS)
            webp = as_webp(browser, page.screenshot())
            page.evaluate(DRAW_ON)
            file = DOCS / f"console-{scheme}.webp"
            file.write_bytes(webp)
            print(f"{file.relative_to(DOCS.parent)}: {len(webp):,} bytes")


if __name__ == "__main__":
    main()
