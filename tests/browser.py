"""Chromium without a window, for tests of the console.

Playwright's synchronous API keeps an event loop in its thread for as long as it is open, beside which no other can run:
so a browser is a module's at most, of a module with no coroutines among its tests.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

TIMEOUT_MS = 30_000  # for what must come to be seen; on a busy machine, too
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# What Chromium itself writes into its console of an answer that is no 200, or of none.
REFUSED = r"Failed to load resource: "


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Where there is none the test is skipped, unless TESTS_NEED_A_BROWSER=1 says that there must be one."""
    path = shutil.which("chromium")
    if path is None:
        message = "there is no chromium to be found"
        if os.environ.get("TESTS_NEED_A_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=4 * TIMEOUT_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def new_page(
    browser: Browser, width: int = 1280, height: int = 900, scheme: Any = "light", may_say: str | None = None, **of: Any
) -> Iterator[Page]:
    """A page in a profile of its own; `of` goes to Playwright's `new_context`.

    At the end it has written no error or warning into its console, and a broken Content-Security-Policy is one, nor
    opened a dialog: but for those that begin as the pattern `may_say`.
    """
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **of)
    try:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        yield page
    finally:
        context.close()
    unexpected = [said for said in complaints if may_say is None or not re.match(may_say, said)]
    assert not unexpected, unexpected
