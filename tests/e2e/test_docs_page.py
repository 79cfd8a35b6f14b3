"""/docs in a browser: a route can be tried there, with an API key if the server needs one."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.browser import chromium
from tests.support.server_process import ServerProcess


def test_a_request_can_be_sent_and_its_answer_is_shown(server: ServerProcess) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{server.url}/docs")
        for path, answer in (
            ("/generate", "The sky is blue."),
            ("/v1/models/demo", '"id":"demo"'),
            ("/generate_stream?", '"generated_text":" The sky is blue."'),
        ):
            form = page.locator(f"form:has(input[value^='{path}'])").first
            form.get_by_role("button").click()
            expect(form.locator(".answer")).to_contain_text("200 OK")
            expect(form.locator(".answer")).to_contain_text(answer)
