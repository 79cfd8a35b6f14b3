"""The console at work, as docs/console-light.webp and docs/console-dark.webp.

    python -m scripts.screenshot

Everything in the pictures happens: a server with a simulated model, conversations and long prompts that come one after
another, and sixteen copies of a prompt that the page itself asks for. Only the device is not there; so the answers are
no words (docs/simulated_model.md).
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

from tests.browser import TIMEOUT_MS, chromium
from tests.server_process import ServerProcess, serving

DOCS = Path(__file__).parents[1] / "docs"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTH, HEIGHT = 1600, 1000
MOST_BYTES = 120_000  # of a picture

MODEL = "sim:step=18ms,decode=150us,prefill=35us"
SETTINGS = ("--num-kv-blocks", "3600", "--max-num-seqs", "40", "--log-level", "warning")
PREAMBLE = "You answer what is asked, and nothing else. " * 60  # of half of the long prompts: found in the cache
# (how many clients, prompt in tokens, answer in tokens): one after another, each a little different
LOAD = ((9, 120, 320), (4, 900, 200), (4, 7600, 40))

# The page's own sixteen stream, and beside them a long prompt is half way through. Then nothing more is drawn, for
# that is over before a picture is taken.
IS_GOOD = """() => {
    const rows = [...document.querySelectorAll("#live-root .bars button:not([hidden])")];
    const stateOf = (row) => row.querySelector(".state").textContent;
    const numbers = (row) => parseInt(row.querySelector(".numbers").textContent);
    const streams = rows.filter((row) => row.matches(".mine") && stateOf(row) === "decode" && numbers(row) > 60);
    const bottom = document.querySelector("#live-root .bars").getBoundingClientRect().bottom;
    const seen = rows.filter((row) => row.getBoundingClientRect().bottom < bottom);
    const prefills = seen.filter((row) => stateOf(row) === "prefill" && row.textContent.includes("/7,600"));
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


def one_after_another(server: ServerProcess, client: int, prompt_length: int, max_tokens: int, enough: Event) -> None:
    number = 0
    with httpx2.Client(base_url=server.url, timeout=120) as connection, suppress(httpx2.TransportError):
        while not enough.is_set():
            start = PREAMBLE if client % 2 else f"Client {client} begins in its own words. "
            prompt = (start + f"And now for question {number} of client {client}: " * prompt_length)[:prompt_length]
            asked = {"prompt": prompt, "max_tokens": max_tokens + 17 * ((client + number) % 9)}
            connection.post("/v1/completions", json=asked)
            number += 1


@contextmanager
def busy_server() -> Iterator[ServerProcess]:
    """Its clients notice by their connections' end that it is gone."""
    num_clients = sum(clients for clients, _, _ in LOAD)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_clients) as threads, ExitStack() as stack:
        server = stack.enter_context(serving("--model", MODEL, *SETTINGS, log=Path(folder) / "log"))
        enough = Event()
        stack.callback(enough.set)
        for clients, prompt_length, max_tokens in LOAD:
            for client in range(clients):
                threads.submit(one_after_another, server, client, prompt_length, max_tokens, enough)
        yield server


def ask_for_copies(page: Page) -> None:
    page.locator('[name="n"]').fill("16")
    page.locator('[name="max_tokens"]').fill("600")
    page.get_by_role("button", name="Send").click()


def as_webp(browser: Browser, png: bytes) -> bytes:
    """As good as is small enough. Chromium does it: nothing has to be installed for a picture."""
    page = browser.new_page()
    for quality in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        webp = base64.b64decode(page.evaluate(TO_WEBP, [base64.b64encode(png).decode(), quality]))
        if len(webp) <= MOST_BYTES:
            page.close()
            return webp
    raise AssertionError(f"a picture of {len(webp):,} bytes, and {MOST_BYTES:,} are the most; show less in it")


def main() -> None:
    with busy_server() as server, chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(server.url)
        while server.client.get("/ui/state").json().get("num_steps", 0) < 160:  # of 200 in the picture
            time.sleep(0.1)
        ask_for_copies(page)
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
