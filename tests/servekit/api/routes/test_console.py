"""Claims about how the console's files are served. The whole application is called, without a socket."""

from __future__ import annotations

import re

import pytest

from tests.support.asgi import CONSOLE, ask, make_app, paths_of

BROWSER = ("accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")
FILES = sorted(path.name for path in CONSOLE.iterdir())
PAGE = "index.html"


@pytest.mark.parametrize("name", FILES)
async def test_each_file_is_served_whole_under_a_strict_policy(name: str) -> None:
    path, content = "/ui" if name == PAGE else f"/ui/{name}", (CONSOLE / name).read_bytes()
    answer = await ask(make_app(), "GET", path)
    assert answer.status == 200 and answer.body == content
    media_types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(media_types[name.split(".")[-1]])
    assert answer.headers["content-length"] == str(len(content))
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        **dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'"),
        "img-src": "'self' data:",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


async def test_a_browser_gets_the_page_at_the_root_and_programs_get_json() -> None:
    app, page = make_app(), (CONSOLE / PAGE).read_bytes()
    for accept in (BROWSER, ("accept", "TEXT/HTML")):
        answer = await ask(app, "GET", "/", accept)
        assert answer.body == page and answer.headers["vary"] == "Accept"
    for headers in ([], [("accept", "*/*")], [("accept", "application/json")], [("accept", "text/*")]):
        answer = await ask(app, "GET", "/", *headers)
        assert answer.headers["content-type"] == "application/json" and answer.headers["vary"] == "Accept"
        assert b'"name":"servekit"' in answer.body
    posted = await ask(app, "POST", "/", BROWSER, body=b'{"inputs": "a"}')
    assert posted.status == 503, "POST / is TGI's route, and no model is loaded here"


async def test_unchanged_file_is_not_sent_again() -> None:
    app = make_app()
    tag = (await ask(app, "GET", "/ui/app.js")).headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    for known in (tag, f"W/{tag}", f'"x", {tag}', f"{tag},", "*"):
        answer = await ask(app, "GET", "/ui/app.js", ("if-none-match", known))
        assert (answer.status, answer.body) == (304, b"") and answer.headers["etag"] == tag
        assert "content-length" not in answer.headers and "content-security-policy" in answer.headers
    for unknown in ('"x"', "", tag[:-2] + '"', tag.strip('"')):
        assert (await ask(app, "GET", "/ui/app.js", ("if-none-match", unknown))).status == 200, unknown
    assert (await ask(app, "GET", "/ui/style.css", ("if-none-match", tag))).status == 200, "the tag of another file"
    root = await ask(app, "GET", "/", BROWSER)
    assert (await ask(app, "GET", "/", BROWSER, ("if-none-match", root.headers["etag"]))).status == 304
    as_json = await ask(app, "GET", "/", ("if-none-match", root.headers["etag"]))
    assert as_json.status == 200 and "etag" not in as_json.headers, "only the page has a tag"


@pytest.mark.parametrize(
    "path",
    [
        "/ui/",
        "/ui/nowhere.js",
        "/ui/index.html",
        "/ui/../keys.py",
        "/ui/..%2fkeys.py",
        "/ui/app.js/",
        "/ui//app.js",
        "/ui/APP.JS",
        "/ui/.",
        "/ui/__init__.py",
        "/ui/app.js\x00",
        "/console/app.js",
        "/app.js",
        "/ui/\u2028app.js",
    ],
)
async def test_other_paths_are_not_found(path: str) -> None:
    answer = await ask(make_app(), "GET", path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_no_ui_removes_the_page_and_its_feed() -> None:
    app, with_it = make_app(ui=False), paths_of(make_app())
    assert with_it - paths_of(app) == {path for path in with_it if path.startswith("/ui")}
    for path in ("/ui", "/ui/app.js", "/ui/state", "/ui/events"):
        assert (await ask(app, "GET", path, BROWSER)).status == 404
    answer = await ask(app, "GET", "/", BROWSER)
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    schema = (await ask(app, "GET", "/openapi.json")).body
    assert b"/ui/state" not in schema and b"/ui/state" in (await ask(make_app(), "GET", "/openapi.json")).body


def test_page_refers_only_to_its_own_files() -> None:
    named = set()
    for name in FILES:
        text = (CONSOLE / name).read_text()
        if name == PAGE:
            named |= {found.removeprefix("ui/") for found in re.findall(r'(?:href|src)="(ui/[^"]*)"', text)}
        named |= set(re.findall(r'(?:from|import)\s*\(?\s*"\./([^"]*)"', text))
        assert not re.findall(r"""(?:src|href|url|import|fetch)\s*[=(:]?\s*["'(]\s*(?:https?:)?//""", text), name
    assert named and named <= set(FILES)
