"""/docs: the page for people."""

from __future__ import annotations

import re

from servekit.api.app import ENDPOINTS
from servekit.api.docs_page import page
from servekit.api.openapi import document
from tests.support.asgi import ask, make_app


async def test_page_runs_its_own_script_only_and_loads_nothing() -> None:
    answer = await ask(make_app(), "GET", "/docs")
    policy, text = answer.headers["content-security-policy"], answer.body.decode()
    assert text.count("<script>") == 1 and "src=" not in text and "https://" not in text
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]+';", policy) and "default-src 'none'" in policy


def test_every_operation_can_be_tried() -> None:
    api = document(ENDPOINTS)
    text = page(api, "http://localhost:8000", "demo")
    for path, methods in api["paths"].items():
        for method in methods:
            assert f"<h2><b>{method.upper()}</b> {path}</h2>" in text
    assert text.count("<button>Send</button>") == sum(map(len, api["paths"].values()))


def test_code_in_descriptions_is_marked_up() -> None:
    text = page(document(ENDPOINTS), "http://localhost:8000", "demo")
    assert "`" not in text.partition("<script>")[0]
    assert "<code>inputs</code>" in text
