"""Run Chromium without a window, for tests of the console.

Playwright's synchronous API keeps an event loop in its thread for as long as it is open, and no other loop can run
there. So a browser lives as long as one module at most, and that module has no coroutines among its tests.
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

TIMEOUT_MS = 30_000  # for a state that must come, on a busy machine too
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Chromium's own console message for a response that is not 200, or for none.
FAILED_TO_LOAD = r"Failed to load resource: "


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser. Without Chromium the test is skipped, or fails if TESTS_NEED_A_BROWSER=1."""
    path = shutil.which("chromium")
    if path is None:
        message = "chromium is not installed"
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
    browser: Browser, width: int = 1280, height: int = 900, scheme: Any = "light", allowed: str | None = None, **of: Any
) -> Iterator[Page]:
    """Open a page in a profile of its own; `of` goes to Playwright's `new_context`. At the end it had no complaints."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **of)
    try:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        with no_complaints(page, allowed):
            yield page
    finally:
        context.close()


@contextmanager
def no_complaints(page: Page, allowed: str | None = None) -> Iterator[None]:
    """Assert at the end that the page logged no error or warning and opened no dialog.

    A violation of the Content-Security-Policy is such an error. Messages that begin with the pattern `allowed` are
    ignored.
    """
    complaints: list[str] = []

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def on_error(error: Any) -> None:
        complaints.append(f"uncaught: {error}")

    def on_dialog(dialog: Any) -> None:
        complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    handlers: dict[Any, Any] = {"console": on_console, "pageerror": on_error, "dialog": on_dialog}
    for event, handler in handlers.items():
        page.on(event, handler)
    yield
    for event, handler in handlers.items():
        page.remove_listener(event, handler)
    unexpected = [text for text in complaints if allowed is None or not re.match(allowed, text)]
    assert not unexpected, unexpected
