"""Claims about the pages that `lab`, `plan`, `replay` and `explain` write, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from servekit.cli import main
from servekit.explaining.page import as_page
from servekit.requests.time_causes import TimeCause
from servekit.scheduler.explanation import MAX_INTERVALS, Explanation, Interval
from servekit.scheduler.sequence import FinishReason
from tests.servekit.planning.test_model_shape import LLAMA_8B
from tests.servekit.replaying.services import CONFIG, requests, serve
from tests.support.browser import chromium, new_page

# What is pointed at, and what the note says then.
POINTED_AT = {
    "lab": (".answer", "first token after"),
    "replay": ("svg", "happened"),
    "explain": (".lane span", "after"),
}
# The texts in pictures that are not wholly inside their picture.
CUT_OFF = """[...document.querySelectorAll("svg text")].filter((text) => {
    const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
    return box.x < 0 || box.x + box.width > view.width || box.y < 0 || box.y + box.height > view.height;
}).map((text) => text.textContent)"""
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
        ["lab", "--workload", "textbook", "--requests", "64"],  # its axis has a number at its end
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
                assert page.evaluate(CUT_OFF) == []
                backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
                if name in POINTED_AT:
                    selector, words = POINTED_AT[name]
                    page.locator(selector).first.hover()
                    assert words in page.locator("#note").inner_text()
    assert backgrounds["light"] != backgrounds["dark"]


@pytest.mark.parametrize("number", [3, MAX_INTERVALS])
def test_the_lane_of_an_explanation_ends_with_its_last_interval(number: int, tmp_path: Path, browser: Browser) -> None:
    """Short intervals before it do not move its end out of the picture, however many there are."""
    ends_s = [0.001 * (index + 1) for index in range(number - 1)] + [100.0]
    intervals = [
        Interval(TimeCause.DECODE if index % 2 else TimeCause.PREFILL, start_s, end_s)
        for index, (start_s, end_s) in enumerate(zip([0.0, *ends_s], ends_s, strict=False))
    ]
    explanation = Explanation(
        request_id="mine",
        sequence_id=0,
        is_finished=True,
        finish_reason=FinishReason.LENGTH,
        wall_time_s=ends_s[-1],
        causes={},
        intervals=intervals,
        blocked_s=0.0,
    )
    (tmp_path / "explain.html").write_text(as_page("mine", explanation))
    with new_page(browser, width=400) as page:
        page.goto((tmp_path / "explain.html").as_uri())
        lane, last = (page.locator(selector).bounding_box() for selector in ("#lane", "#lane span:last-child"))
        assert lane is not None and last is not None
        assert last["x"] + last["width"] <= lane["x"] + lane["width"] and last["width"] > 0.9 * lane["width"]
