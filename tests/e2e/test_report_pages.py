"""Claims about the pages that `lab`, `plan`, `replay` and `explain` write, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from servekit.cli import main
from tests.servekit.planning.test_model_shape import LLAMA_8B
from tests.servekit.replaying.services import CONFIG, requests, serve
from tests.support.browser import chromium, new_page

# What is pointed at, and what the note says then.
POINTED_AT = {
    "lab": (".answer", "first token after"),
    "replay": ("svg", "happened"),
    "explain": (".lane span", "after"),
}
DRAWN = {"lab": ".answer", "plan": "svg circle", "replay": "svg .replayed", "explain": ".lane span"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the four pages."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    journal, config = str(folder / "journal"), str(folder / "config.json")
    serve(folder / "journal", CONFIG, requests(30, 30.0))
    few = ["--device", "l4", "--requests", "20", "--prompt-tokens", "2000", "--output-tokens", "20"]
    for arguments in (
        ["lab", "--requests", "16"],
        ["plan", config, *few, "--slo", "ttft:20s,tpot:1s"],
        ["replay", journal, "--num-kv-blocks", "64"],
        ["explain", journal, "7"],
    ):
        assert main([*arguments, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("name", list(DRAWN))
def test_a_page_is_drawn_in_both_schemes_and_fits_narrow_and_wide_windows(
    name: str, folder: Path, browser: Browser
) -> None:
    backgrounds = {}
    for scheme in ("light", "dark"):
        for width in (400, 1600):
            with new_page(browser, width=width, scheme=scheme) as page:
                page.goto((folder / f"{name}.html").as_uri())
                page.locator(DRAWN[name]).nth(1).wait_for(state="attached")  # drawn when the window has a size
                assert page.title() == page.locator("h1").inner_text() != ""
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
                if name in POINTED_AT:
                    selector, words = POINTED_AT[name]
                    page.locator(selector).first.hover()
                    assert words in page.locator("#note").inner_text()
    assert backgrounds["light"] != backgrounds["dark"]
