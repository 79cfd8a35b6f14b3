"""Claims about the console's page and about Play, in a real browser. What the scheduler's window shows is next door."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser import REFUSED, chromium, new_page
from tests.server_process import ServerProcess, free_port, serving

CONSOLE = Path(__file__).parents[2] / "servekit" / "console"
KEY = "canary-of-the-console"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with new_page(browser) as page:
        yield page


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Ten tokens a second for each, and none ends before it is told to."""
    with serving("--model", "sim:step=100ms", log=tmp_path_factory.mktemp("slow") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys.toml").write_text(f'[[key]]\nkey = "{KEY}"\ntenant = "console"\n')
    flags = ["--model", "sim:instant", "--api-keys-file", str(folder / "keys.toml")]
    with serving(*flags, log=folder / "log") as server:
        yield server


def open_at(page: Page, server: ServerProcess) -> None:
    """The page, when it has had its first frame."""
    page.goto(server.url)
    expect(page.locator("#server-state")).to_have_text("ready")


def send(page: Page, text: str | None = None, **fields: Any) -> None:
    """Fill the form's fields, by the API's names, and send it."""
    if text is not None:
        page.locator("#text").fill(text)
    fill(page, **fields)
    page.evaluate(
        "() => { document.getElementById('play-status').textContent = ''; }"
    )  # what was said of an earlier one
    page.get_by_role("button", name="Send").click()


def fill(page: Page, **fields: Any) -> None:
    for name, value in fields.items():
        field = page.locator(f"[name={name}]")
        if not field.is_visible():
            page.locator("summary", has=page.locator(f"xpath=following-sibling::*//*[@name='{name}']")).click()
        if name == "structure":
            field.select_option(value)
        else:
            field.fill(str(value))


def chat(page: Page) -> None:
    page.locator(".switch").get_by_text("Chat").click()


def status(page: Page) -> Any:
    return expect(page.locator("#play-status"))


def texts(page: Page) -> list[str | None]:
    return [box.text_content() for box in page.locator("#answers .untrusted").all()]


# -- open, type, stream ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_the_page_opens_and_answers(server: ServerProcess, page: Page, path: str) -> None:
    page.goto(server.url + path)
    expect(page.locator("#server-state")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("demo")
    expect(page.locator("#key-form")).to_be_hidden()
    send(page)
    status(page).to_have_text("Done.")
    assert [text.strip() for text in texts(page) if text] == ["The sky is blue."]
    # A whole answer that comes at once, as a busy machine may have it, has no speed.
    told = re.compile(r"\d tokens first token \d.*s (\d.* tok/s )?ended by itself")
    expect(page.locator(".figures")).to_have_text(told)


def test_tokens_are_seen_one_by_one(slow: ServerProcess, page: Page) -> None:
    open_at(page, slow)
    # However busy the machine is: of ten tokens a second some five will be seen alone in half a minute.
    page.evaluate("""() => {
        let before = 0, seen = 0;
        new MutationObserver(() => {
            const now = document.querySelector("#answers .untrusted")?.textContent.length ?? 0;
            seen += now === before + 1;
            before = now;
            if (seen === 5) document.documentElement.dataset.five = "seen";
        }).observe(document.querySelector("#answers"), {subtree: true, childList: true, characterData: true});
    }""")
    send(page, max_tokens=1000)
    expect(page.locator("html")).to_have_attribute("data-five", "seen")
    expect(page.locator(".figures")).to_contain_text("tok/s")
    page.get_by_role("button", name="Stop").click()
    status(page).to_have_text("Stopped.")


def test_sixteen_copies_stream_together_and_stop_gives_their_blocks_back(slow: ServerProcess, page: Page) -> None:
    open_at(page, slow)
    send(page, n=16, max_tokens=2000)
    expect(page.locator("#answers .running .untrusted:not(:empty)")).to_have_count(16)
    slow.wait_for_metric("servekit_num_requests_running", 16, timeout_s=30)
    page.get_by_role("button", name="Stop").click()
    status(page).to_have_text("Stopped.")
    expect(page.locator(".figures").filter(has_text="stopped")).to_have_count(16)
    slow.wait_for_metric("servekit_num_requests_running", 0, timeout_s=30)
    slow.wait_until_at_rest()


def test_a_chat_remembers_whole_turns_and_hands_back_the_others(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    chat(page)
    send(page, "How many legs does a cat have?")
    status(page).to_have_text("Done.")
    expect(page.locator("#text")).to_have_value("")
    page.route("**/v1/chat/completions", lambda route: fulfil(route, chat_events("The sky is", None), ended=False))
    send(page, "What color is the sky?")
    status(page).to_contain_text("may not be whole")
    expect(page.locator("#text")).to_have_value("What color is the sky?")
    turns = page.locator("#transcript .untrusted")
    expect(turns).to_have_text(["How many legs does a cat have?", "A cat has four legs."])
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page)
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]
    status(page).to_have_text("Done.")
    page.get_by_role("button", name="New chat").click()
    expect(turns).to_have_count(0)
    assert texts(page) == []


def test_what_is_not_set_is_not_sent(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    with page.expect_request("**/v1/completions") as sent:
        send(page, max_tokens="")
    told = sent.value.post_data_json
    assert told.pop("stream_options")["include_usage"] is True
    assert told == {"model": "demo", "prompt": "What color is the sky?", "stream": True}
    assert re.fullmatch("[A-Za-z0-9._-]{1,64}", sent.value.headers["x-request-id"])


# -- nothing is kept ---------------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_and_a_reload_keeps_nothing(locked: ServerProcess, browser: Browser) -> None:
    with new_page(browser, may_say=REFUSED) as page:
        page.goto(locked.url)
        expect(page.locator("#server-state")).to_contain_text("wants an API key")
        send(page)
        status(page).to_contain_text("wants an API key")
        page.get_by_label("API key").fill("canary-of-another")
        page.keyboard.press("Enter")
        expect(page.locator("#server-state")).to_contain_text("does not know this API key")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#server-state")).to_have_text("ready")
        expect(page.locator("#key-form")).to_be_hidden()
        send(page, "A secret that nobody keeps.", max_tokens=8)
        status(page).to_have_text("Done.")
        page.reload()
        expect(page.locator("#server-state")).to_contain_text("wants an API key")
        expect(page.locator("#text")).to_have_value("What color is the sky?")
        expect(page.get_by_label("API key")).to_have_value("")
        assert texts(page) == []
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert page.context.cookies() == []
        assert page.context.storage_state(indexed_db=True) == {"cookies": [], "origins": []}


# -- errors in words ---------------------------------------------------------------------------------------------------


def test_a_server_that_is_gone_is_missed_and_found_again(browser: Browser, tmp_path: Path) -> None:
    with new_page(browser, may_say=REFUSED) as page, socket.socket() as keeper:
        # Who binds and does not listen lets nobody in, and no other test have the port before it is taken again.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("127.0.0.1", free_port()))
        where: dict[str, Any] = {"log": tmp_path / "log", "port": keeper.getsockname()[1]}
        with serving("--model", "sim:step=50ms", "--reuse-port", **where) as server:
            open_at(page, server)
            send(page, max_tokens=2000)
            expect(page.locator("#answers .untrusted:not(:empty)")).to_have_count(1)
        status(page).to_have_text("The connection broke before the answer was whole.")
        expect(page.locator(".figures")).to_contain_text("cut off")
        expect(page.locator("#server-state")).to_have_text("The server cannot be reached.")
        send(page)
        status(page).to_have_text("The server cannot be reached.")
        with serving("--model", "sim:instant", "--reuse-port", **where):
            expect(page.locator("#server-state")).to_have_text("ready")
            send(page, max_tokens=8)
            status(page).to_have_text("Done.")


def test_a_refusal_is_told_with_the_field_that_it_is_about(server: ServerProcess, browser: Browser) -> None:
    with new_page(browser, may_say=REFUSED) as page:
        open_at(page, server)
        send(page, structure="regex", structure_text="(")
        status(page).to_contain_text("structured_outputs.regex")
        expect(page.locator(".figures")).to_have_count(0)  # nothing had begun, so nothing was cut off


def events(*texts: str, finish_reason: str | None = "stop", **more: Any) -> list[dict[str, Any]]:
    """A stream of /v1/completions, as a list: one answer, and then `more` beside its last event's choices."""
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    return [*chunks, {"choices": [{"index": 0, "text": "", "finish_reason": finish_reason}], **more}]


def chat_events(text: str, finish_reason: str | None = "stop") -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}]


def fulfil(route: Route, told: list[dict[str, Any]], ended: bool = True) -> None:
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in told)
    route.fulfill(content_type="text/event-stream; charset=utf-8", body=body + "data: [DONE]\n\n" * ended)


OVERLOADED = json.dumps({"error": {"message": "8 are waiting already", "param": None, "code": "overloaded"}})
GAVE_UP = [*events("The sky")[:1], {"error": {"message": "the worker ended"}}]


ANSWERS: list[tuple[Any, str]] = [
    ({"status": 503, "headers": {"Retry-After": "7"}, "body": OVERLOADED}, "8 are waiting already (try again in 7 s)"),
    ({"status": 429, "headers": {"Retry-After": "60"}, "body": OVERLOADED}, "(try again in 60 s)"),
    ({"status": 502, "body": "<h1>Bad Gateway</h1>"}, "The server answered 502 Bad Gateway."),
    (GAVE_UP, "The server gave up: the worker ended"),
    (events("The sky", finish_reason="abort"), "deadline passed"),
]


def test_what_went_wrong_is_told_in_words(server: ServerProcess, browser: Browser) -> None:
    with new_page(browser, may_say=REFUSED) as page:
        open_at(page, server)
        for answer, words in ANSWERS:
            reply = partial(fulfil, told=answer) if isinstance(answer, list) else partial(Route.fulfill, **answer)
            page.route("**/v1/completions", reply)
            send(page)
            status(page).to_contain_text(words)
            expect(page.get_by_role("button", name="Send")).to_be_enabled()
            page.unroute("**/v1/completions")


def test_play_goes_on_when_the_live_view_fails(server: ServerProcess, browser: Browser) -> None:
    broken = "export class Live { show() { throw new Error('a planted bug') } lost() {} mine() {} }"
    with new_page(browser, may_say="Error: a planted bug") as page:
        page.route("**/ui/live.js", lambda route: route.fulfill(content_type="text/javascript", body=broken))
        open_at(page, server)
        expect(page.locator("#notice")).to_contain_text("a planted bug")
        send(page)
        status(page).to_have_text("Done.")


# -- what a model may say ----------------------------------------------------------------------------------------------

HOSTILE = [
    "<script>document.title = 'taken'</script><img src=x onerror=alert(1)></div></li><a href='javascript:alert(2)'>x",
    "\x1b[31mred\x1b[0m\x1b]8;;http://example.org\x07a link\x07\x9b1m\x00\r\b\x7f",
    "\u202eright to left \u2066 isolated, never ended \u200f\u061c \u05d0\u05d1",
    "W" * 10_000,
    "a" + "\u0301" * 500,
]
HARMLESS = "␛[31mred␛[0m␛]8;;http://example.org␇a link␇\ufffd1m␀␍␈␡"


@pytest.mark.parametrize("is_chat", [False, True])
def test_hostile_output_is_text_and_nothing_else(server: ServerProcess, browser: Browser, is_chat: bool) -> None:
    with new_page(browser, width=400) as page:
        open_at(page, server)
        title = page.title()
        if is_chat:
            chat(page)
        for text in HOSTILE:
            told = chat_events(text) if is_chat else events(*text.partition("[3"))
            page.route(re.compile("/v1/"), partial(fulfil, told=told))
            send(page, "Say something.")
            status(page).to_have_text("Done.")
            (shown,) = texts(page)
            assert shown == (HARMLESS if text.startswith("\x1b") else text)
            assert page.locator("#play :is(script, img, a)").count() == 0
            assert page.locator("#answers .untrusted *").count() == 0
            assert page.locator("#answers .untrusted").evaluate("box => getComputedStyle(box).unicodeBidi") == "isolate"
            assert page.locator("#answers li").bounding_box()["height"] < 600
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.unroute(re.compile("/v1/"))
        assert page.title() == title


def test_of_a_very_long_answer_the_end_is_shown(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    pieces = [f"{number:09d}\n" for number in range(10_000)]
    page.route("**/v1/completions", lambda route: fulfil(route, events(*pieces)))
    send(page)
    status(page).to_have_text("Done.")
    (shown,) = texts(page)
    assert shown is not None and 20_000 <= len(shown) < 22_000 and "".join(pieces).endswith(shown)
    expect(page.locator(".cut")).to_have_text(f"{100_000 - len(shown)} characters before are not shown")


def test_events_survive_every_cut_of_their_bytes(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    wire = (
        "\ufeff: a comment\r\nretry: 1\r\ndata: grün 😀\r\ndata: blau\r\n\r\n"
        "event: state\rid: 7\rdata:one\rdata:  two\r\r"
        'event: nothing\n\ndata\n\n:\ndata: {"a": "b: c"}\n\ndata: never ended'
    )
    expected = [
        {"type": "message", "data": "grün 😀\nblau"},
        {"type": "state", "data": "one\n two"},
        {"type": "message", "data": ""},
        {"type": "message", "data": '{"a": "b: c"}'},
    ]
    seen = page.evaluate(
        """async (bytes) => {
            const {eventsOf} = await import("/ui/sse.js");
            const all = new Set();
            for (let cut = 0; cut <= bytes.length; cut++) {
                const pieces = cut ? [bytes.slice(0, cut), bytes.slice(cut)] : bytes.map((byte) => [byte]);
                const body = new ReadableStream({start(stream) {
                    for (const piece of pieces) stream.enqueue(new Uint8Array(piece));
                    stream.close();
                }});
                const events = [];
                for await (const some of eventsOf(new Response(body))) events.push(...some);
                all.add(JSON.stringify(events));
            }
            return [...all].map((events) => JSON.parse(events));
        }""",
        list(wire.encode()),
    )
    assert seen == [expected]


# -- the same request elsewhere ----------------------------------------------------------------------------------------

AWKWARD = "It's \"50 $\" of $(date) `id` !! \\n \\' {x}\nA new\tline; ünï 😀 \u202e\u180e\U000e0041\U000e0101\x1b[1m"


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_is_copied_asks_for_what_the_page_got(server: ServerProcess, browser: Browser, is_chat: bool) -> None:
    with new_page(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        open_at(page, server)
        if is_chat:
            chat(page)
        fields = {"n": 3, "max_tokens": 12, "temperature": 1.5, "seed": 11, "top_k": 40, "min_p": 0.01}
        fill(page, **fields, repetition_penalty=1.1, stop='zzz\n"a\\nb"', structure="regex", structure_text="[a-z' ]+")
        page.locator("#text").fill(AWKWARD)
        curl, python = copied(page, "curl"), copied(page, "Python")
        with page.expect_request(re.compile("/v1/")) as sent:
            send(page)
        status(page).to_have_text("Done.")
        got = texts(page)

        assert all(got) and sent.value.post_data_json["stop"] == ["zzz", "a\nb"]
        assert json.loads(shlex.split(curl)[-1]) == sent.value.post_data_json
        done = subprocess.run(["/bin/bash", "-c", curl], capture_output=True, text=True, timeout=60)
        assert answers_in(done.stdout) == got, done.stderr
        namespace: dict[str, Any] = {}
        with redirect_stdout(io.StringIO()) as printed:
            exec(python, namespace)  # noqa: S102
        namespace["client"].close()
        assert printed.getvalue() == "\n".join(text or "" for text in got) + "\n"


def copied(page: Page, name: str) -> str:
    page.get_by_role("button", name=f"Copy as {name}").click()
    status(page).to_have_text(f"Copied as {name}.")
    text: str = page.evaluate("navigator.clipboard.readText()")
    assert not re.search("[\x1b\u202e\u180e\U000e0041\U000e0101]", text), "a terminal would not show it as it is"
    return text


def answers_in(stream: str) -> list[str]:
    answers = ["", "", ""]
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                answers[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return answers


def test_without_a_clipboard_a_dialog_shows_what_to_copy_and_never_the_key(
    locked: ServerProcess, browser: Browser
) -> None:
    with new_page(browser, may_say=REFUSED) as page:
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        page.goto(locked.url)
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#server-state")).to_have_text("ready")
        fill(page, max_tokens=8)
        for name in ("curl", "Python"):
            page.get_by_role("button", name=f"Copy as {name}").click()
            expect(page.get_by_role("dialog", name=f"Copy as {name}")).to_be_visible()
            text = page.evaluate("getSelection().toString()")
            assert "API_KEY" in text and KEY not in text
            if name == "curl":
                environment = {**os.environ, "API_KEY": KEY}
                done = subprocess.run(
                    ["/bin/bash", "-c", text], capture_output=True, text=True, timeout=60, env=environment
                )
                assert done.stdout.rstrip().endswith("data: [DONE]"), done.stderr
            page.keyboard.press("Escape")
            expect(page.get_by_role("dialog")).to_be_hidden()


# -- for everybody -----------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(slow: ServerProcess, page: Page) -> None:
    open_at(page, slow)
    for summary in page.locator("#play summary").all():
        summary.press("Enter")
    fill(page, structure="choice")
    page.locator("h1").click()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.outerHTML"))
    page.locator("h1").click()
    controls = "#play :is(a, summary, button, input:not([type=radio]), input:checked, select, textarea)"
    wanted = page.locator(f"header a, {controls}").evaluate_all(
        "all => all.filter((each) => each.checkVisibility()).map((each) => each.outerHTML)"
    )
    assert len(wanted) > 15
    assert set(wanted) <= reached, set(wanted) - reached
    fill(page, structure="")
    page.locator("#text").press("Control+Enter")
    expect(page.locator("#answers .running .untrusted:not(:empty)")).to_have_count(1)
    page.keyboard.press("Escape")
    status(page).to_have_text("Stopped.")


def test_every_control_has_a_name_and_the_page_has_landmarks(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    send(page, n=2)
    status(page).to_have_text("Done.")
    page.locator("#play details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
    fill(page, structure="json")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    told = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    controls = {"button", "textbox", "spinbutton", "combobox", "radio", "link", "region"}
    nameless = [role for role, name in told if role in controls and not name.strip()]
    assert not nameless
    names = [name for role, name in told if role in controls]
    assert {"Prompt", "Copies", "Max tokens", "Top p", "Play", "Live", "Send", "API docs"} <= set(names)
    assert {"banner", "main", "region", "status"} <= {role for role, _ in told}
    assert {("group", "Answer #1"), ("group", "Answer #2"), ("list", "Answers")} <= set(told)


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1100, "light"), (1600, "light")])
def test_nothing_is_wider_than_the_window(server: ServerProcess, browser: Browser, width: int, scheme: str) -> None:
    with new_page(browser, width=width, scheme=scheme) as page:
        open_at(page, server)
        send(page, n=64, max_tokens=8)
        status(page).to_have_text("Done.")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        play, live = page.locator("#play").bounding_box(), page.locator("#live").bounding_box()
        assert play is not None and live is not None
        assert (play["x"] < live["x"]) == (width >= 1100) and (play["y"] < live["y"]) == (width < 1100)


def test_text_stands_out_from_what_it_stands_on() -> None:
    style = (CONSOLE / "style.css").read_text()
    light = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", style.partition("@media")[0]))
    dark = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", style.partition("@media")[2]))
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for ink in ("ink", "muted", "accent", "good", "warn", "bad"):
            for ground in ("bg", "panel"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground, colours)
        assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
        assert contrast(colours["cached"], colours["panel"]) >= 3, "the edge of a field"


def contrast(one: str, other: str) -> float:
    """WCAG 2's, from 1 to 21."""
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_page_is_small_and_asks_nobody_else() -> None:
    files = [path for path in CONSOLE.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 60_000
    for path in files:
        assert not re.search("https?://", path.read_text()), path.name
