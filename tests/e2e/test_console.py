"""Claims about the console's page and its playground, in a real browser.

test_console_live.py has the claims about the scheduler view.
"""

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
from playwright.sync_api import Browser, Locator, Page, Route

from tests.support.browser import FAILED_TO_LOAD, chromium, new_page, no_complaints
from tests.support.server_process import ServerProcess, free_port, serving
from tests.support.triton_server import triton_server

CONSOLE = Path(__file__).parents[2] / "servekit" / "console"
KEY = "canary-of-the-console"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shared_page(browser: Browser) -> Iterator[Page]:
    """One page for most tests: each loads it anew, which is faster than a new browser context."""
    with new_page(browser, allowed="") as page:  # each test checks its own complaints
        yield page


@pytest.fixture
def page(shared_page: Page) -> Iterator[Page]:
    with no_complaints(shared_page):
        yield shared_page
        shared_page.unroute_all()


@pytest.fixture
def failing_page(shared_page: Page) -> Iterator[Page]:
    """The shared page, for tests in which responses fail: the browser logs each of these."""
    with no_complaints(shared_page, allowed=FAILED_TO_LOAD):
        yield shared_page
        shared_page.unroute_all()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Ten tokens a second for each sequence, and no sequence ends before its max_tokens."""
    with serving("--model", "sim:step=100ms", log=tmp_path_factory.mktemp("slow") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with an API key."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys.toml").write_text(f'[[key]]\nkey = "{KEY}"\ntenant = "console"\n')
    flags = ["--model", "sim:instant", "--api-keys-file", str(folder / "keys.toml")]
    with serving(*flags, log=folder / "log") as server:
        yield server


def open_at(page: Page, server: ServerProcess) -> None:
    """Load the page and wait for its first frame."""
    page.goto(server.url)
    wait_for_state(page, "ready")


def wait_for_text(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    """Wait until an element contains a text. Quicker than expect(), which looks again after up to a second."""
    page.locator(selector).filter(has_text=text).wait_for()


def wait_for_state(page: Page, text: str) -> None:
    wait_for_text(page, "#server-state", text)


def wait_for_status(page: Page, text: str) -> None:
    wait_for_text(page, "#request-status", text)


def send(page: Page, text: str | None = None, **fields: Any) -> None:
    """Fill the form's fields, by the API's names, and send it."""
    if text is not None:
        page.locator("#text").fill(text)
    fill(page, **fields)
    # What the status says of an earlier request must not pass for this one's.
    page.evaluate("() => { document.getElementById('request-status').textContent = ''; }")
    page.locator("#send-button").click()


def fill(page: Page, **fields: Any) -> None:
    for name, value in fields.items():
        field = page.locator(f"[name={name}]")
        if not field.is_visible():
            page.locator("summary", has=page.locator(f"xpath=following-sibling::*//*[@name='{name}']")).click()
        if name == "structure":
            field.select_option(value)
        else:
            field.fill(str(value))


def choose_chat(page: Page) -> None:
    page.locator(".switch").get_by_text("Chat").click()


def answer_texts(page: Page) -> list[str | None]:
    return [box.text_content() for box in page.locator("#answers .untrusted").all()]


# -- one request -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_page_opens_and_streams_an_answer(server: ServerProcess, page: Page, path: str) -> None:
    page.goto(server.url + path)
    wait_for_state(page, "ready")
    assert page.locator("#model").inner_text() == "demo"
    assert not page.locator("#key-form").is_visible()
    send(page)
    wait_for_status(page, "Done.")
    assert [text.strip() for text in answer_texts(page) if text] == ["The sky is blue."]
    # All tokens of an answer may come at once on a busy machine. Then it has no speed.
    wait_for_text(page, ".figures", re.compile(r"\d tokens first token \d.*s (\d.* tok/s )?end of text"))


def test_tokens_are_shown_one_by_one(slow: ServerProcess, page: Page) -> None:
    open_at(page, slow)
    # Even on a busy machine, five of ten tokens a second are drawn separately within half a minute.
    page.evaluate("""() => {
        window.numSingle = 0;
        let before = 0;
        new MutationObserver(() => {
            const now = document.querySelector("#answers .untrusted")?.textContent.length ?? 0;
            if (now === before + 1) window.numSingle += 1;
            before = now;
        }).observe(document.querySelector("#answers"), {subtree: true, childList: true, characterData: true});
    }""")
    send(page, max_tokens=1000)
    page.wait_for_function("() => window.numSingle >= 5")
    wait_for_text(page, ".figures", "tok/s")
    page.locator("#stop-button").click()
    wait_for_status(page, "Stopped.")


def test_stop_ends_sixteen_streaming_copies_and_frees_their_blocks(slow: ServerProcess, page: Page) -> None:
    open_at(page, slow)
    send(page, n=16, max_tokens=2000)
    page.locator("#answers:not(:has(li:not(.running), .untrusted:empty)) li:nth-child(16)").wait_for()
    slow.wait_for_metric("servekit_num_requests_running", 16)
    page.locator("#stop-button").click()
    wait_for_status(page, "Stopped.")
    assert page.locator(".figures").filter(has_text="stopped").count() == 16
    slow.wait_for_metric("servekit_num_requests_running", 0)
    slow.wait_until_at_rest()


def test_chat_keeps_whole_turns_and_returns_the_message_of_a_failed_one(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    choose_chat(page)
    send(page, "How many legs does a cat have?")
    wait_for_status(page, "Done.")
    assert page.locator("#text").input_value() == ""
    page.route("**/v1/chat/completions", lambda route: fulfil(route, chat_events("The sky is", None), ended=False))
    send(page, "What color is the sky?")
    wait_for_status(page, "may be incomplete")
    assert page.locator("#text").input_value() == "What color is the sky?"
    turns = page.locator("#transcript .untrusted")
    assert [text.strip() for text in turns.all_text_contents()] == [
        "How many legs does a cat have?",
        "A cat has four legs.",
    ]
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page)
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]
    wait_for_status(page, "Done.")
    page.get_by_role("button", name="New chat").click()
    assert turns.count() == 0
    assert answer_texts(page) == []


def test_chat_is_in_order_with_the_newest_answer_next_to_the_form(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    send(page)  # a prompt, whose answer is no part of the chat
    wait_for_status(page, "Done.")
    choose_chat(page)
    for question in ("How many legs does a cat have?", "What color is the sky?"):
        send(page, question)
        wait_for_status(page, "Done.")
    boxes = page.locator("#playground .untrusted")
    places = [bounds(box)["y"] for box in boxes.all()]
    assert places == sorted(places)
    texts = ["How many legs does a cat have?", "A cat has four legs.", "What color is the sky?", "The sky is blue."]
    assert [text.strip() for text in boxes.all_text_contents()] == texts
    newest, message = bounds(boxes.last), bounds(page.locator("#text"))
    assert 0 < message["y"] - (newest["y"] + newest["height"]) < 60, "the message field is next to the newest answer"
    page.locator(".switch").get_by_text("Prompt").click()
    choose_chat(page)
    assert [text.strip() for text in boxes.all_text_contents()] == texts
    send(page, "Hi")  # the answer that was a card is a turn now
    wait_for_status(page, "Done.")
    assert [text.strip() for text in boxes.all_text_contents()][:5] == [*texts, "Hi"]


def bounds(of: Locator) -> dict[str, float]:
    box = of.bounding_box()
    assert box is not None, "it is not visible"
    return dict(box)


def test_long_chat_scrolls_to_its_newest_answer(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    choose_chat(page)
    page.route("**/v1/chat/completions", lambda route: fulfil(route, chat_events("a line\n" * 30)))
    for _ in range(3):
        send(page, "Write a poem.")
        wait_for_status(page, "Done.")
    end = "([box]) => box.scrollHeight - box.scrollTop - box.clientHeight"
    assert page.locator("#conversation").evaluate_all(end) < 2


def test_system_prompt_comes_first_in_a_chat(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    assert not page.locator("[name=system]").is_visible()
    choose_chat(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "What color is the sky?", system="Answer in one word.")
    assert sent.value.post_data_json["messages"] == [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What color is the sky?"},
    ]
    wait_for_status(page, "Done.")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Really?", system="")
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]


def test_empty_fields_are_not_sent(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    with page.expect_request("**/v1/completions") as sent:
        send(page, max_tokens="")
    body = sent.value.post_data_json
    assert body.pop("stream_options")["include_usage"] is True
    assert body == {"model": "demo", "prompt": "What color is the sky?", "stream": True}
    assert re.fullmatch("[A-Za-z0-9._-]{1,64}", sent.value.headers["x-request-id"])


# -- nothing is stored -------------------------------------------------------------------------------------------------


def test_page_asks_for_the_key_and_a_reload_keeps_nothing(locked: ServerProcess, browser: Browser) -> None:
    with new_page(browser, allowed=FAILED_TO_LOAD) as page:
        page.goto(locked.url)
        wait_for_state(page, "needs an API key")
        send(page)
        wait_for_status(page, "needs an API key")
        page.get_by_label("API key").fill("canary-of-another")
        page.keyboard.press("Enter")
        wait_for_state(page, "does not know this API key")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        wait_for_state(page, "ready")
        assert not page.locator("#key-form").is_visible()
        send(page, "A secret that is not stored.", max_tokens=8)
        wait_for_status(page, "Done.")
        page.reload()
        wait_for_state(page, "needs an API key")
        assert page.locator("#text").input_value() == "What color is the sky?"
        assert page.get_by_label("API key").input_value() == ""
        assert answer_texts(page) == []
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert page.context.cookies() == []
        assert page.context.storage_state(indexed_db=True) == {"cookies": [], "origins": []}


# -- error messages ----------------------------------------------------------------------------------------------------


def test_page_reports_a_lost_server_and_reconnects(failing_page: Page, tmp_path: Path) -> None:
    page = failing_page
    with socket.socket() as keeper:
        # A socket that is bound and does not listen accepts no connection, and keeps the port from other tests.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("127.0.0.1", free_port()))
        where: dict[str, Any] = {"log": tmp_path / "log", "port": keeper.getsockname()[1]}
        with serving("--model", "sim:step=50ms", "--reuse-port", **where) as server:
            open_at(page, server)
            send(page, max_tokens=2000)
            page.locator("#answers .untrusted:not(:empty)").wait_for()
        wait_for_status(page, "The connection broke before the answer ended.")
        wait_for_text(page, ".figures", "cut off")
        wait_for_state(page, "The server cannot be reached.")
        send(page)
        wait_for_status(page, "The server cannot be reached.")
        with serving("--model", "sim:instant", "--reuse-port", **where):
            # The page tries again by itself after up to 10 s, and at once when its tab comes to the front.
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            wait_for_state(page, "ready")
            send(page, max_tokens=8)
            wait_for_status(page, "Done.")


def test_page_tries_again_by_itself_after_a_second(server: ServerProcess, failing_page: Page) -> None:
    failing_page.route("**/ui/events", lambda route: route.abort(), times=1)
    failing_page.goto(server.url)
    wait_for_state(failing_page, "The server cannot be reached.")
    wait_for_state(failing_page, "ready")


def test_refusal_names_the_field(server: ServerProcess, failing_page: Page) -> None:
    open_at(failing_page, server)
    send(failing_page, structure="regex", structure_text="(")
    wait_for_status(failing_page, "structured_outputs.regex")
    assert failing_page.locator(".figures").count() == 0  # no answer had begun, so none was cut off


def events(*texts: str, finish_reason: str | None = "stop", **more: Any) -> list[dict[str, Any]]:
    """The events of a stream of /v1/completions with one answer; `more` stands beside the choices of the last event."""
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    return [*chunks, {"choices": [{"index": 0, "text": "", "finish_reason": finish_reason}], **more}]


def chat_events(text: str, finish_reason: str | None = "stop") -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}]


def fulfil(route: Route, chunks: list[dict[str, Any]], ended: bool = True) -> None:
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in chunks)
    route.fulfill(content_type="text/event-stream; charset=utf-8", body=body + "data: [DONE]\n\n" * ended)


OVERLOADED = json.dumps({"error": {"message": "the queue is full", "param": None, "code": "overloaded"}})
FAILED = [*events("The sky")[:1], {"error": {"message": "the worker ended"}}]


ANSWERS: list[tuple[Any, str]] = [
    ({"status": 503, "headers": {"Retry-After": "7"}, "body": OVERLOADED}, "the queue is full (try again in 7 s)"),
    ({"status": 429, "headers": {"Retry-After": "60"}, "body": OVERLOADED}, "(try again in 60 s)"),
    ({"status": 502, "body": "<h1>Bad Gateway</h1>"}, "The server answered 502 Bad Gateway."),
    (FAILED, "The request failed: the worker ended"),
    (events("The sky", finish_reason="abort"), "deadline passed"),
]


def test_each_kind_of_failure_has_a_message(server: ServerProcess, failing_page: Page) -> None:
    page = failing_page
    open_at(page, server)
    for answer, message in ANSWERS:
        reply = partial(fulfil, chunks=answer) if isinstance(answer, list) else partial(Route.fulfill, **answer)
        page.route("**/v1/completions", reply)
        send(page)
        wait_for_status(page, message)
        page.locator("#send-button[aria-disabled=false]").wait_for()
        page.unroute("**/v1/completions")


def test_playground_works_when_the_scheduler_view_fails(server: ServerProcess, shared_page: Page) -> None:
    page = shared_page
    broken = """export class SchedulerView {
        showFrame() { throw new Error("a planted bug"); }
        showDisconnected() {}
        addOwnRequest() {}
    }"""
    with no_complaints(page, allowed="Error: a planted bug"):
        script = partial(Route.fulfill, content_type="text/javascript", body=broken)
        page.route("**/ui/scheduler_view.js", script)
        open_at(page, server)
        wait_for_text(page, "#notice", "There is a bug in the scheduler view: a planted bug.")
        send(page)
        wait_for_status(page, "Done.")
        page.unroute_all()


# -- model output is untrusted -----------------------------------------------------------------------------------------

HOSTILE = [
    "<script>document.title = 'taken'</script><img src=x onerror=alert(1)></div></li><a href='javascript:alert(2)'>x",
    "\x1b[31mred\x1b[0m\x1b]8;;http://example.org\x07a link\x07\x9b1m\x00\r\b\x7f",
    "\u202eright to left \u2066 isolated, never ended \u200f\u061c \u05d0\u05d1",
    "W" * 10_000,
    "a" + "\u0301" * 500,
]
HARMLESS = "␛[31mred␛[0m␛]8;;http://example.org␇a link␇\ufffd1m␀␍␈␡"


@pytest.mark.parametrize("is_chat", [False, True])
def test_hostile_output_is_shown_as_text_only(server: ServerProcess, browser: Browser, is_chat: bool) -> None:
    with new_page(browser, width=400) as page:
        open_at(page, server)
        title = page.title()
        if is_chat:
            choose_chat(page)
        for text in HOSTILE:
            chunks = chat_events(text) if is_chat else events(*text.partition("[3"))
            page.route(re.compile("/v1/"), partial(fulfil, chunks=chunks))
            send(page, "Say something.")
            wait_for_status(page, "Done.")
            (shown,) = answer_texts(page)
            assert shown == (HARMLESS if text.startswith("\x1b") else text)
            assert page.locator("#playground :is(script, img, a)").count() == 0
            assert page.locator("#answers .untrusted *").count() == 0
            assert page.locator("#answers .untrusted").evaluate("box => getComputedStyle(box).unicodeBidi") == "isolate"
            assert page.locator("#answers li").bounding_box()["height"] < 600
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.unroute(re.compile("/v1/"))
        assert page.title() == title


def test_reasoning_is_shown_apart_from_the_answer_as_text_only(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    choose_chat(page)
    reasoning = {"choices": [{"index": 0, "delta": {"reasoning_content": f"Hm <b>{HOSTILE[0]}"}}]}
    page.route(re.compile("/v1/"), partial(fulfil, chunks=[reasoning, *chat_events("Yes.")]))
    for _ in range(2):
        with page.expect_request(re.compile("/v1/chat")) as request:
            send(page, "Say something.")
        wait_for_status(page, "Done.")
        assert answer_texts(page) == ["Yes."]
        assert (page.locator("#answers .reasoning").text_content() or "").startswith("Hm <b>")
        assert page.locator("#answers .reasoning *").count() == 0
    said = [message["content"] for message in request.value.post_data_json["messages"]]
    assert said == ["Say something.", "Yes.", "Say something."], "the reasoning is not sent back"


def test_end_of_a_very_long_answer_is_shown(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    pieces = [f"{number:09d}\n" for number in range(10_000)]
    page.route("**/v1/completions", lambda route: fulfil(route, events(*pieces)))
    send(page)
    wait_for_status(page, "Done.")
    (shown,) = answer_texts(page)
    assert shown is not None and 20_000 <= len(shown) < 22_000 and "".join(pieces).endswith(shown)
    assert page.locator(".cut").inner_text() == f"The first {100_000 - len(shown)} characters are not shown."


def test_event_parser_accepts_bytes_cut_anywhere(server: ServerProcess, page: Page) -> None:
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
            const {readEvents} = await import("/ui/event_stream.js");
            const all = new Set();
            for (let cut = 0; cut <= bytes.length; cut++) {
                const pieces = cut ? [bytes.slice(0, cut), bytes.slice(cut)] : bytes.map((byte) => [byte]);
                const body = new ReadableStream({start(stream) {
                    for (const piece of pieces) stream.enqueue(new Uint8Array(piece));
                    stream.close();
                }});
                const events = [];
                for await (const some of readEvents(new Response(body))) events.push(...some);
                all.add(JSON.stringify(events));
            }
            return [...all].map((events) => JSON.parse(events));
        }""",
        list(wire.encode()),
    )
    assert seen == [expected]


# -- copy as curl, copy as Python --------------------------------------------------------------------------------------

AWKWARD = "It's \"50 $\" of $(date) `id` !! \\n \\' {x}\nA new\tline; ünï 😀 \u202e\u180e\U000e0041\U000e0101\x1b[1m"


@pytest.mark.parametrize("is_chat", [False, True])
def test_copied_code_sends_the_request_of_the_page(server: ServerProcess, browser: Browser, is_chat: bool) -> None:
    with new_page(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        open_at(page, server)
        if is_chat:
            choose_chat(page)
        fields = {"n": 3, "max_tokens": 12, "temperature": 1.5, "seed": 11, "top_k": 40, "min_p": 0.01}
        fill(page, **fields, repetition_penalty=1.1, stop='zzz\n"a\\nb"', structure="regex", structure_text="[a-z' ]+")
        page.locator("#text").fill(AWKWARD)
        curl, python = copied(page, "curl"), copied(page, "Python")
        with page.expect_request(re.compile("/v1/")) as sent:
            send(page)
        wait_for_status(page, "Done.")
        got = answer_texts(page)

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
    wait_for_status(page, f"Copied as {name}.")
    text: str = page.evaluate("navigator.clipboard.readText()")
    assert not re.search("[\x1b\u202e\u180e\U000e0041\U000e0101]", text), "a terminal would not show this character"
    return text


def answers_in(stream: str) -> list[str]:
    answers = ["", "", ""]
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                answers[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return answers


def test_without_a_clipboard_a_dialog_shows_the_code_without_the_key(locked: ServerProcess, browser: Browser) -> None:
    with new_page(browser, allowed=FAILED_TO_LOAD) as page:
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        page.goto(locked.url)
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        wait_for_state(page, "ready")
        fill(page, max_tokens=8)
        for name in ("curl", "Python"):
            page.get_by_role("button", name=f"Copy as {name}").click()
            page.get_by_role("dialog", name=f"Copy as {name}").wait_for()
            text = page.evaluate("getSelection().toString()")
            assert "API_KEY" in text and KEY not in text
            if name == "curl":
                environment = {**os.environ, "API_KEY": KEY}
                done = subprocess.run(
                    ["/bin/bash", "-c", text], capture_output=True, text=True, timeout=60, env=environment
                )
                assert done.stdout.rstrip().endswith("data: [DONE]"), done.stderr
            page.keyboard.press("Escape")
            page.get_by_role("dialog").wait_for(state="hidden")


# -- accessibility and layout ------------------------------------------------------------------------------------------


def test_every_control_is_reached_by_keyboard(slow: ServerProcess, page: Page) -> None:
    open_at(page, slow)
    for summary in page.locator("#playground summary").all():
        summary.press("Enter")
    fill(page, structure="choice")
    page.locator("h1").click()
    page.evaluate("""() => {
        window.reached = [];
        document.addEventListener("focusin", ({ target }) => reached.push(target.outerHTML));
    }""")
    for _ in range(40):
        page.keyboard.press("Tab")
    reached = set(page.evaluate("reached"))
    page.locator("h1").click()
    controls = "#playground :is(a, summary, button, input:not([type=radio]), input:checked, select, textarea)"
    wanted = page.locator(f"header a, {controls}").evaluate_all(
        "all => all.filter((each) => each.checkVisibility()).map((each) => each.outerHTML)"
    )
    assert len(wanted) > 15
    assert set(wanted) <= reached, set(wanted) - reached
    fill(page, structure="")
    page.locator("#text").press("Control+Enter")
    page.locator("#answers .running .untrusted:not(:empty)").wait_for()
    page.keyboard.press("Escape")
    wait_for_status(page, "Stopped.")


def test_controls_have_names_and_the_page_has_landmarks(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    send(page, n=2)
    wait_for_status(page, "Done.")
    page.locator("#playground details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
    fill(page, structure="json")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    nodes = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    controls = {"button", "textbox", "spinbutton", "combobox", "radio", "link", "region"}
    nameless = [role for role, name in nodes if role in controls and not name.strip()]
    assert not nameless
    names = [name for role, name in nodes if role in controls]
    assert {"Prompt", "Copies", "Max tokens", "Top p", "Playground", "Scheduler", "Send", "API docs"} <= set(names)
    assert {"banner", "main", "region", "status"} <= {role for role, _ in nodes}
    assert {("group", "Answer #1"), ("group", "Answer #2"), ("list", "Answers")} <= set(nodes)


def test_page_does_not_scroll_sideways(server: ServerProcess, page: Page) -> None:
    open_at(page, server)
    send(page, n=64, max_tokens=8)
    wait_for_status(page, "Done.")
    try:
        for width in (400, 1100, 1600):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            playground, scheduler = bounds(page.locator("#playground")), bounds(page.locator("#scheduler"))
            assert (playground["x"] < scheduler["x"]) == (width >= 1100), width
            assert (playground["y"] < scheduler["y"]) == (width < 1100), width
    finally:
        page.set_viewport_size({"width": 1280, "height": 900})


def test_model_that_is_chosen_is_shown_and_gets_the_requests(page: Page, tmp_path: Path) -> None:
    with serving("one=sim:instant", "two=sim:instant", log=tmp_path / "log") as server:
        open_at(page, server)
        choice = page.locator("#model-choice")
        assert choice.locator("option").all_text_contents() == ["one: ready", "two: ready"]
        assert choice.input_value() == "one" and not page.locator("#model").is_visible()
        choice.select_option("two")
        page.locator("#model").filter(has_text="two").wait_for(state="attached")  # a frame of it has come
        send(page, "Hello", max_tokens=3)
        wait_for_status(page, "Done.")
        assert choice.input_value() == "two"
        line = 'servekit_http_requests_total{handler="/v1/completions",method="POST",model_name="two",status="200"} 1.0'
        assert line in server.client.get("/metrics").text
        steps = page.locator(".charts")
        steps.filter(has_text=re.compile(r"Step \d")).wait_for()
        choice.select_option("one")
        steps.filter(has_text="No step yet.").wait_for()  # those of the other model are not shown as its own
        page.goto("about:blank")  # or it would complain about the end of the server


def test_model_of_a_triton_server_has_a_form_for_tensors(page: Page, tmp_path: Path) -> None:
    with triton_server() as triton:
        entry = '[[model]]\nid = "{0}"\nkind = "triton"\nmodel = "{0}"\nremote = {{ url = "{1}" }}\n'
        file = tmp_path / "models.toml"
        file.write_text("".join(entry.format(name, triton.url) for name in ("sum", "lengths")))
        with serving("--models", str(file), log=tmp_path / "log") as server:
            open_at(page, server)
            rows, status = page.locator("#predictions tr"), page.locator("#prediction-status")

            def send_text(text: str, answer: str) -> list[str]:
                page.locator("textarea[name=first]").fill(text)
                page.locator("#predict-button").click()
                status.filter(has_text=answer).wait_for()
                return rows.all_inner_texts()

            page.locator("#predictor-form").wait_for()
            assert not page.locator("#playground-form").is_visible()
            tensors = [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2]} for name in "AB"]
            assert send_text(json.dumps(tensors), "Done.") == ["SUM: FP32[1,2]\t3, 4", "LARGEST: FP32[1]\t4"]
            assert send_text("[1", "The tensors are not valid JSON") == []
            page.locator("#model-choice").select_option("lengths")
            page.locator("#model").filter(has_text="lengths").wait_for(state="attached")
            assert send_text("four", "Done.") == ["LENGTH: INT64[1,1]\t4"]
            page.goto("about:blank")  # or it would complain about the end of the server


def test_text_has_enough_contrast() -> None:
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


def test_page_names_no_other_server() -> None:
    for path in CONSOLE.iterdir():
        assert not re.search("https?://", path.read_text()), path.name
