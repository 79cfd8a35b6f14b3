"""Claims about the console's scheduler view, in a browser: what it shows of given frames, and of a real server.

Frames are made from the server's own structs and given to a `SchedulerView` of the page's own modules, under the page's
own Content-Security-Policy. What fades does so by the page's clock: tests move that time, or wait until it is gone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Locator, Page, expect

from servekit.api.schemas.json_body import encode
from servekit.observability.live_frames import (
    CACHED,
    FENCED,
    FREE,
    MAX_CELLS,
    MAX_SEQUENCES,
    MAX_STEPS,
    SHARED,
    LiveEnd,
    LiveLimits,
    LiveSequence,
    LiveState,
    LiveStep,
    LiveWorker,
)
from tests.support.browser import chromium, new_page, no_complaints
from tests.support.server_process import ServerProcess, serving

LIMITS = LiveLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_total_tokens=16384, num_blocks=100, block_size=16)
HOSTILE = "<img src=x onerror=\"document.title='harmed'\">"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Sixteen answers of 4,000 tokens fit, and take minutes: they run as long as a test needs them."""
    log = tmp_path_factory.mktemp("live") / "log"
    with serving("--model", "sim:step=50ms", "--num-kv-blocks", "8000", log=log) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class FedView:
    """A SchedulerView that shows given frames, on a page whose own feed stays silent."""

    def __init__(self, page: Page, server: ServerProcess) -> None:
        self.page = page
        self.root = page.locator("#fed")
        self.rows = page.locator("#fed .sequences button:visible")
        self.details = page.get_by_role("dialog")
        page.route("**/ui/events", lambda route: None)  # never answered
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#scheduler-view.scheduler-view")
        page.evaluate(
            """() => {
                window.onePixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
                window.pixel = (canvas, x, y) => {
                    onePixel.clearRect(0, 0, 1, 1);
                    onePixel.drawImage(canvas, -x, -y);
                    return [...onePixel.getImageData(0, 0, 1, 1).data];
                };
            }"""
        )
        self.reset()

    def reset(self) -> None:
        """Replace the view by a new one: faster than a new page for each test."""
        self._times = count(1000)
        self.page.evaluate(
            """async () => {
                const { SchedulerView } = await import("/ui/scheduler_view.js");
                const root = document.createElement("div");
                root.id = "fed";
                (document.getElementById("fed") ?? document.getElementById("scheduler-view")).replaceWith(root);
                window.view = new SchedulerView(root);
            }"""
        )

    def show(self, state: LiveState, result: str = "null", *, keep_time: bool = False) -> Any:
        """Draw a frame. Returns the value of `result` at that moment: later, a flash may be over on a slow machine."""
        state = state if keep_time else replace(state, now_s=float(next(self._times)))
        draw = f"state => {{ view.showFrame(state); view.draw(); return {result}; }}"
        return self.page.evaluate(draw, json.loads(encode(state)))

    def disconnect(self, reason: str) -> None:
        self.page.evaluate("reason => { view.showDisconnected(reason); view.draw(); }", reason)

    def wait_for_text(self, text: str) -> None:
        self.root.filter(has_text=text).wait_for()

    def row(self, sequence_id: int) -> Locator:
        return self.rows.filter(has=self.page.get_by_text(f"#{sequence_id}", exact=True))

    def row_texts(self) -> list[str]:
        return self.rows.all_inner_texts()

    def pixel(self, part: str, x: float, y: float) -> list[int]:
        """Red, green, blue and opacity, at a place in device pixels."""
        read = "([part, x, y]) => pixel(view.parts[part].canvas, x, y)"
        colour: list[int] = self.page.evaluate(read, [part, x, y])
        return colour

    def colour(self, name: str) -> list[int]:
        """A colour of the style sheet, as a canvas draws it."""
        return self._drawn(f"cssColour('{name}')")

    def colour_of(self, sequence_id: int) -> list[int]:
        return self._drawn(f"colourOf({sequence_id})")

    def _drawn(self, colour: str) -> list[int]:
        draw = """() => {
            onePixel.fillStyle = view.parts.blocks.COLOUR;
            onePixel.fillRect(0, 0, 1, 1);
            return [...onePixel.getImageData(0, 0, 1, 1).data];
        }""".replace("COLOUR", colour)
        drawn: list[int] = self.page.evaluate(draw)
        return drawn

    def cell(self, index: int) -> list[int]:
        """The colour of a cell of the grid near its upper left corner, off its diagonal and inside of its outline."""
        x, y, side = self.page.evaluate("index => view.parts.blocks.squareOf(index)", index)
        return self.pixel("blocks", x + side // 4, y + side // 4)

    def resize(self, width: int) -> None:
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.evaluate("view.draw()")


@pytest.fixture(scope="module")
def shared_view(browser: Browser, server: ServerProcess) -> Iterator[FedView]:
    with new_page(browser, allowed="") as page:  # each test checks its own complaints
        yield FedView(page, server)


@pytest.fixture
def fed(shared_view: FedView) -> Iterator[FedView]:
    shared_view.reset()
    with no_complaints(shared_view.page):
        yield shared_view
    shared_view.resize(1280)


def state_of(*sequences: LiveSequence, **fields: Any) -> LiveState:
    fields = {"num_running": len(sequences), "limits": LIMITS, "num_free_blocks": 100, "cells": [(FREE, 100)], **fields}
    workers = [LiveWorker("serving", "cpu", "float32", "pages")]
    return LiveState(0.0, "ready", "", "a model", "1.0", workers, sequences=list(sequences), **fields)


def sequence(
    sequence_id: int, state: Literal["waiting", "prefill", "decode"] = "decode", num_computed: int = 120, **fields: Any
) -> LiveSequence:
    fields = {"num_prompt_tokens": 100, "num_output_tokens": 21, "max_tokens": 256, "arrival_s": 990.0, **fields}
    return LiveSequence(sequence_id, state, num_computed_tokens=num_computed, **fields)


def ended(sequence_id: int, reason: str = "length") -> LiveEnd:
    counts = {"num_prompt_tokens": 100, "num_output_tokens": 30, "max_tokens": 30}
    return LiveEnd(sequence_id, reason, **counts, arrival_s=990.0, ended_s=1000.0)


def wait_for_count(page: Page, selector: str, number: int) -> None:
    """Wait until so many elements are visible."""
    count_visible = "([selector]) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility())"
    page.wait_for_function(
        f"([selector, number]) => ({count_visible})([selector]).length === number", arg=[selector, number]
    )


# -- a real server -----------------------------------------------------------------------------------------------------


def test_16_copies_have_16_rows_until_their_client_disconnects(browser: Browser, server: ServerProcess) -> None:
    body = {"prompt": "x" * 100, "n": 16, "max_tokens": 4000, "stream": True}
    with new_page(browser) as page:
        page.goto(server.url)
        status = page.locator("#scheduler-view .status")
        rows = "#scheduler-view .sequences button"
        status.filter(has_text="Idle.").wait_for()
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            wait_for_count(page, rows, 16)
            page.locator(rows).filter(has_text="decode").nth(15).wait_for()
            page.locator(".legend .shared").filter(has_not_text=re.compile("shared 0$")).wait_for()
            status.filter(has_text="Requests are running.").wait_for()
        status.filter(has_text="Idle.").wait_for()
        wait_for_count(page, f"{rows}:not(.ended)", 0)


# -- sequences ---------------------------------------------------------------------------------------------------------


def test_details_show_where_the_time_of_a_request_went(browser: Browser, server: ServerProcess) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 4000, "ignore_eos": True}
    with new_page(browser) as page:
        page.goto(server.url)
        with server.client.stream("POST", "/generate_stream", json=body, headers={"X-Request-Id": "seen"}) as response:
            assert response.status_code == 200
            page.locator("#scheduler-view .sequences button:not(.ended)").first.click()  # not one of the test before
            lane = page.get_by_role("dialog").locator(".time-lane")
            lane.locator('.lane [data-cause="decode"]').first.wait_for()
            causes = lane.locator(".causes li")
            causes.filter(has_text=re.compile(r"^decode [\d.]+ m?s, \d+ %$")).wait_for()
        page.get_by_role("dialog").filter(has_text="ended after").wait_for()
        widths = "() => [...document.querySelectorAll('.lane span')].map((each) => parseFloat(each.style.width))"
        assert sum(page.evaluate(widths)) == pytest.approx(100, abs=0.01), "the intervals fill the lane"


def test_preempted_sequence_flashes_for_a_while(fed: FedView) -> None:
    flashing = "[...document.querySelectorAll('#fed .flash')].map((row) => row.innerText.split(/\\s+/))"
    # Sequence 2 was preempted before the page was opened.
    assert fed.show(state_of(sequence(1), sequence(2, num_preemptions=1)), flashing) == []
    preempted = state_of(sequence(1, "waiting", 0, num_preemptions=1), sequence(2, num_preemptions=1))
    assert fed.show(preempted, flashing) == [["#1", "preempted", "0/121"]]
    fed.page.evaluate("() => { view.history.get(1).preemptedAtMs -= 1500; }")  # as if these ms had passed
    wait_for_count(fed.page, "#fed .flash", 0)
    assert fed.show(preempted, flashing) == []


def test_preempted_sequence_is_marked_without_motion_if_the_user_wants_none(fed: FedView) -> None:
    try:
        fed.page.emulate_media(reduced_motion="reduce")
        fed.show(state_of(sequence(1)))
        style = "getComputedStyle(document.querySelector('#fed .flash'))"
        preempted = state_of(sequence(1, "waiting", 0, num_preemptions=1))
        motion, mark = fed.show(preempted, f"[{style}.animationName, {style}.boxShadow]")
        assert motion == "none"
        assert mark != "none"
    finally:
        fed.page.emulate_media(reduced_motion="no-preference")


def test_row_keeps_its_place_and_element_while_its_sequence_lives(fed: FedView) -> None:
    fed.show(state_of(*map(sequence, range(4))))
    fed.page.evaluate("() => { window.before = [...document.querySelectorAll('#fed .sequences button')]; }")
    places = [fed.row(number).bounding_box() for number in (0, 2, 3)]
    # The order in the frame changes, as after a preemption. An ended sequence stays for a while, then leaves a gap.
    seen = "[...document.querySelectorAll('#fed .ended')].map((row) => row.innerText.split(/\\s+/))"
    others = (sequence(3), sequence(2), sequence(0))
    assert fed.show(state_of(*others, ended=[ended(1)]), seen) == [["#1", "length", "30/256"]]
    fed.page.evaluate("() => { view.parts.sequences.rows[1].endedAtMs -= 3000; }")  # as if these ms had passed
    wait_for_count(fed.page, "#fed .sequences button", 3)
    assert [fed.row(number).bounding_box() for number in (0, 2, 3)] == places
    fed.show(state_of(*others, sequence(4)))  # takes the gap
    now = "[...document.querySelectorAll('#fed .sequences button')].every((button, index) => button === before[index])"
    assert fed.page.evaluate(now)
    assert [text.split()[0] for text in fed.row_texts()] == ["#0", "#4", "#2", "#3"]


def test_sequence_that_began_and_ended_between_two_frames_is_shown_once(fed: FedView) -> None:
    now_s = 1000.5
    early = replace(ended(3), ended_s=999.0)  # before the page was opened
    fed.show(replace(state_of(ended=[ended(7), early]), now_s=now_s), keep_time=True)
    assert [text.split() for text in fed.row_texts()] == [["#7", "length", "30/30"]]
    fed.row(7).click()
    fed.details.filter(has_text="generated 30 of at most 30").wait_for()
    fed.page.keyboard.press("Escape")
    leave = "document.activeElement.blur(); view.parts.sequences.rows[0].endedAtMs -= 3000; view.redrawAfter(0);"
    fed.page.evaluate(f"() => {{ {leave} }}")
    wait_for_count(fed.page, "#fed .sequences button", 0)
    fed.show(replace(state_of(ended=[ended(7)]), now_s=now_s), keep_time=True)
    assert fed.rows.count() == 0


def bar_scale(fed: FedView) -> dict[str, float]:
    scale: dict[str, float] = fed.page.evaluate("view.parts.sequences.scale")
    return scale


def bar_ends(fed: FedView, sequence_id: int) -> list[float]:
    """Where the segments of a bar end, in percent of the width."""
    background: str = fed.row(sequence_id).locator(".bar-of-tokens").evaluate("bar => bar.style.background")
    return [float(end) for end in re.findall(r"0(?:px|%)?,? ([0-9.]+)%", background)]


def test_scale_of_the_bars_stays_while_sequences_grow(fed: FedView) -> None:
    scales, ends = [], []
    for num_output in range(1, 3900, 300):
        grown = sequence(1, "decode", 99 + num_output, num_output_tokens=num_output, max_tokens=4000)
        fed.show(state_of(grown, sequence(2, max_tokens=50)))
        scales.append(bar_scale(fed))
        ends.append(bar_ends(fed, 1)[-1])
    assert all(scale == scales[0] for scale in scales), "the scale changed though only a sequence grew"
    assert ends == sorted(ends)
    assert ends[0] < ends[-1] <= 100


def test_scale_covers_ended_sequences_on_a_fresh_page(fed: FedView) -> None:
    brief = replace(ended(7), num_prompt_tokens=700, num_output_tokens=300, max_tokens=300)
    fed.show(replace(state_of(ended=[brief]), now_s=1000.5), keep_time=True)
    assert bar_scale(fed)["maxTokens"] >= 1000
    assert max(bar_ends(fed, 7)) <= 100
    fed.wait_for_text("0 to 1,024 tokens")


def test_short_sequences_stay_visible_beside_a_long_limit(fed: FedView) -> None:
    fed.show(state_of(sequence(1), sequence(2, max_tokens=100_000)))
    assert bar_ends(fed, 1)[-1] > 5
    fed.wait_for_text("non-linear scale")


def test_a_bar_shows_how_many_tokens_came_from_drafts(fed: FedView) -> None:
    """The scale ends at 384 tokens. Of 101 tokens of an answer, 40 were drafts; another answer has had none."""
    drafted = sequence(1, num_computed=200, num_output_tokens=101, num_drafted_tokens=90, num_accepted_tokens=40)
    fed.show(state_of(drafted, sequence(2, num_computed=200, num_output_tokens=101)))

    def ends(sequence_id: int) -> dict[str, float]:
        """Where each segment of a bar ends, in percent, by the name of its colour."""
        bar = fed.row(sequence_id).locator(".bar-of-tokens")
        found = re.findall(r"var\((--[a-z-]+)\) 0(?:px)? ([0-9.]+)%", bar.evaluate("bar => bar.style.background"))
        return {name: float(end) for name, end in found}

    first, second = ends(1), ends(2)
    assert bar_scale(fed) == {"maxTokens": 384, "exponent": 1}
    assert first["--decode"] == pytest.approx(100 * 161 / 384, abs=0.1)
    assert first["--drafted"] == second["--drafted"] == pytest.approx(100 * 201 / 384, abs=0.1)
    assert second["--decode"] == second["--drafted"], "no segment of drafts"
    fed.row(1).click()
    expect(fed.details).to_contain_text("drafts: 40 of 90 accepted")


def test_own_sequences_are_marked(fed: FedView) -> None:
    # Of all requests that the page sent, the last 64 are remembered.
    fed.page.evaluate("() => { for (let number = 0; number < 70; number++) view.addOwnRequest(`before-${number}`); }")
    fed.page.evaluate("view.addOwnRequest('request-7')")
    assert fed.page.evaluate("view.ownRequestIds.size") == 64
    fed.show(state_of(sequence(1, request_id="request-7"), sequence(2, request_id="request-8"), sequence(3)))
    assert [("yours" in text) for text in fed.row_texts()] == [True, False, False]
    assert "yours" in (fed.rows.first.get_attribute("aria-label") or "")


def test_sequences_beyond_those_of_a_frame_are_counted(fed: FedView) -> None:
    fed.show(state_of(sequence(1), num_waiting=1500))
    assert fed.root.get_by_text("and 1,500 more waiting").is_visible()


def test_details_open_and_close_by_keyboard_and_show_the_numbers(fed: FedView) -> None:
    fields = {"num_cached_tokens": 64, "num_blocks": 9, "first_scheduled_s": 990.25, "first_token_s": 991.5}
    other = sequence(1)
    for num_output in (21, 31, 41):  # a second apart
        alive = sequence(2, "decode", 99 + num_output, num_output_tokens=num_output, **fields)
        fed.show(state_of(other, alive))
    fed.rows.first.focus()
    fed.page.keyboard.press("ArrowDown")
    fed.page.keyboard.press("Enter")
    fed.details.wait_for()
    assert fed.details.locator("p").inner_text().splitlines() == [
        "arrived 12.0 s ago",
        "waited 250 ms",
        "first token after 1.5 s",
        "now 10.0 tokens/s",
        "prompt: 100 tokens, 64 from the cache",
        "prefilled 100",
        "generated 41 of at most 256",
        "KV blocks: 9",
        "preemptions: 0",
        "not ended",
    ]
    fed.show(state_of(other, replace(alive, state="waiting", num_computed_tokens=0, num_preemptions=1)))
    fed.details.filter(has_text="140 tokens to recompute").wait_for()
    fed.show(state_of(other, ended=[ended(2, "stop")]))
    fed.details.filter(has_text="ended after 10.0 s: stop").wait_for()
    fed.page.evaluate("() => { view.parts.sequences.rows[1].endedAtMs = -1e9; }")  # longer ago than a row stays
    fed.page.evaluate(
        "() => { window.heard = []; document.addEventListener('keydown', ({ key }) => heard.push(key)); }"
    )
    fed.page.keyboard.press("Escape")
    fed.details.wait_for(state="hidden")
    assert fed.page.evaluate("heard") == []  # or Escape would also stop the playground's request
    assert fed.page.evaluate("document.activeElement.textContent.startsWith('#2')")


# -- bounded memory ----------------------------------------------------------------------------------------------------


def test_samples_of_a_sequence_are_bounded(fed: FedView) -> None:
    state = json.loads(encode(state_of(sequence(1))))
    samples = fed.page.evaluate(
        """state => {
            for (let frame = 0; frame < 1000; frame++) view.history.addFrame({ ...state, now_s: frame / 10 });
            return view.history.get(1).samples;
        }""",
        state,
    )
    assert samples[-1][0] == 99.9
    assert 19 <= len(samples) <= 21  # of two seconds


def test_rows_are_bounded_however_many_sequences_come_and_go(fed: FedView) -> None:
    """Each frame has other sequences than the one before, and each of them has a row."""
    for first in range(0, 6 * MAX_SEQUENCES, MAX_SEQUENCES):
        ids = range(first, first + MAX_SEQUENCES)
        seen = "view.parts.sequences.usedRows().filter((row) => !row.isEnded).map((row) => row.sequenceId)"
        assert sorted(fed.show(state_of(*map(sequence, ids)), seen)) == list(ids)
        assert fed.page.evaluate("view.parts.sequences.rows.length") <= 2 * MAX_SEQUENCES


def test_records_of_ended_sequences_are_bounded(fed: FedView) -> None:
    for first in range(0, 600, 100):
        fed.show(state_of(*map(sequence, range(first, first + 100))))
        fed.page.evaluate("first => { if (!first) view.select(7); }", first)
    remembered = fed.page.evaluate("[...view.history.keys()]")
    assert len(remembered) <= 256
    assert set(remembered) >= {7, *range(500, 600)}  # the selected one, and those of the newest frame


# -- steps -------------------------------------------------------------------------------------------------------------


def test_step_is_drawn_in_the_colours_of_its_tokens(fed: FedView) -> None:
    prefill, decode = LiveStep(7, 1.0, 2018, 30, 31, 0.061), LiveStep(8, 1.1, 0, 30, 30, 0.009)
    fed.show(state_of(sequence(1), steps=[prefill, decode]))
    (left, width), (right, _) = (fed.page.evaluate(f"view.parts.steps.columnOf({step_id})") for step_id in (7, 8))
    height = fed.page.evaluate("view.parts.steps.canvas.height")
    assert fed.pixel("steps", left, height // 4) == fed.colour("prefill")
    assert fed.pixel("steps", right, height // 4) == [0, 0, 0, 0]
    for x in (left, right):
        assert fed.pixel("steps", x, height - 10) == fed.colour("decode")
    assert left + width <= right
    readout = fed.root.get_by_role("slider", name="Steps")
    readout.focus()
    for key in ("ArrowLeft", "ArrowLeft"):
        fed.page.keyboard.press(key)
    description = "Step 7: 2,018 prefill + 30 decode tokens, 31 sequences, 61 ms"
    assert readout.get_attribute("aria-valuetext") == description
    readout.filter(has_text=description).wait_for()


@pytest.mark.parametrize("has_prefill", [False, True])
def test_decode_steps_are_no_flat_line_in_the_main_chart(fed: FedView, has_prefill: bool) -> None:
    steps = [LiveStep(number, 1.0, 0, 30, 30, 0.01) for number in range(1, 51)]
    if has_prefill:
        steps[10] = LiveStep(11, 1.0, 2018, 30, 31, 0.061)
    fed.show(state_of(sequence(1), steps=steps))
    x, _ = fed.page.evaluate("view.parts.steps.columnOf(30)")
    floor = round(0.62 * fed.page.evaluate("view.parts.steps.canvas.height"))
    decode = fed.colour("decode")
    assert all(fed.pixel("steps", x, y) == decode for y in (floor - 2, floor - floor // 4)), (
        "30 of 2,048 tokens are flat"
    )


def test_steps_beyond_a_frame_are_kept_and_bounded(fed: FedView) -> None:
    def steps_from(first: int) -> list[LiveStep]:
        return [LiveStep(first + number, 1.0, 0, 30, 30, 0.01) for number in range(MAX_STEPS)]

    early = [LiveStep(0, 0.0, 2000, 30, 31, 0.061), *steps_from(1)[:-1]]
    fed.show(state_of(sequence(1), steps=early))
    for first in range(150, 1800, 150):  # frames overlap
        fed.show(state_of(sequence(1), steps=steps_from(first)))
    ids = fed.page.evaluate("view.stepHistory.steps.map((step) => step[0])")
    assert ids == list(range(1650 + MAX_STEPS)), "each step once"
    fed.root.get_by_label("Steps shown").select_option(label="last 2,000 steps")
    fed.page.evaluate("view.draw()")
    assert fed.page.evaluate("view.parts.steps.groupSize") == 10
    assert fed.page.evaluate("view.parts.steps.describe(0)") == (
        "Steps 0 to 9; the largest, step 0: 2,000 prefill + 30 decode tokens, 31 sequences, 61 ms"
    )
    state = json.loads(encode(state_of(steps=steps_from(0))))
    kept = fed.page.evaluate(
        """state => {
            for (let first = 2000; first < 30_000; first += 200) {
                view.stepHistory.addFrame({ steps: state.steps.map(([id, ...rest]) => [id + first, ...rest]) });
            }
            return view.stepHistory.steps.map((step) => step[0]);
        }""",
        state,
    )
    assert (len(kept), kept[0], kept[-1]) == (20_000, 10_000, 29_999)


def test_duration_of_a_step_replaces_in_flight(fed: FedView) -> None:
    fed.show(state_of(sequence(1), steps=[LiveStep(1, 1.0, 0, 30, 30, None)]))
    fed.wait_for_text("30 sequences, in flight")
    fed.show(state_of(sequence(1), steps=[LiveStep(1, 1.0, 0, 30, 30, 0.01)]))
    fed.wait_for_text("30 sequences, 10 ms")


# -- KV blocks ---------------------------------------------------------------------------------------------------------


def test_cell_has_the_colour_of_its_sequence_or_state(fed: FedView) -> None:
    cells = [(5, 10), (6, 10), (SHARED, 10), (CACHED, 10), (FENCED, 10), (FREE, 50)]
    fed.show(state_of(sequence(5), sequence(6), cells=cells))
    seen = [fed.cell(first) for first in (0, 10, 20, 30, 50)]
    others = [fed.colour(name) for name in ("shared", "cached", "free")]
    assert seen == [fed.colour_of(5), fed.colour_of(6), *others]
    assert len({tuple(colour) for colour in seen}) == 5
    x, y, side = fed.page.evaluate("view.parts.blocks.squareOf(25)")
    assert fed.pixel("blocks", x + side // 2, y + side // 2) != fed.colour("shared")  # its diagonal
    x, y, _ = fed.page.evaluate("view.parts.blocks.squareOf(45)")
    assert fed.pixel("blocks", x, y) == fed.colour("fenced")
    assert fed.root.locator(".legend .owned").inner_text() == "owned 20"

    x, y, side = fed.page.evaluate("view.parts.blocks.squareOf(12)")
    fed.root.locator("canvas").nth(1).click(position={"x": x + side / 2, "y": y + side / 2})
    fed.details.filter(has_text="Sequence 6").wait_for()
    assert fed.cell(12) == fed.colour_of(6)
    assert fed.cell(2) != fed.colour_of(5)  # paler: another sequence


def test_cells_of_several_blocks_are_labelled(fed: FedView) -> None:
    limits = replace(LIMITS, num_blocks=100_000)
    fed.show(state_of(limits=limits, cells=[(3, 4000)], blocks_per_cell=25))
    fed.wait_for_text("100,000, 25 to a cell")
    assert fed.root.locator(".legend .owned").inner_text() == "owned 4,000 cells"
    readout = fed.root.get_by_role("slider", name="KV blocks")
    readout.focus()
    for key in ("ArrowRight", "ArrowRight"):
        fed.page.keyboard.press(key)
    assert readout.get_attribute("aria-valuetext") == "Blocks 25 to 49: sequence 3"


def test_charts_have_a_text_alternative(fed: FedView) -> None:
    steps = [LiveStep(1, 1.0, 2000, 48, 49, 0.061), LiveStep(2, 1.1, 0, 30, 30, None)]
    fed.show(state_of(sequence(1), steps=steps))
    canvases = fed.root.locator("canvas").all()
    labels = " ".join(canvas.get_attribute("aria-label") or "" for canvas in canvases)
    for text in ("2,000 prefill and 78 decode tokens", "Blocks: owned 0"):
        assert text in labels
    assert all(canvas.get_attribute("role") == "img" for canvas in canvases)
    assert fed.root.locator("[aria-live]").count() == 0


# -- faults ------------------------------------------------------------------------------------------------------------


def test_text_from_clients_is_never_markup(fed: FedView) -> None:
    hostile = sequence(1, request_id=HOSTILE)
    fed.page.evaluate("id => view.addOwnRequest(id)", HOSTILE)
    worker = LiveWorker(HOSTILE, HOSTILE, HOSTILE, HOSTILE, host=HOSTILE)
    fed.show(replace(state_of(hostile), model_name=HOSTILE, version=HOSTILE, workers=[worker]))
    fed.rows.first.click()
    fed.show(replace(state_of(ended=[ended(1, HOSTILE)]), model_name=HOSTILE, state=HOSTILE, stage=HOSTILE))
    fed.details.filter(has_text=f"Sequence 1: {HOSTILE}").wait_for()
    fed.disconnect(HOSTILE)
    fed.wait_for_text(HOSTILE)
    assert fed.root.locator("img").count() == 0
    assert "harmed" not in fed.page.title()


def test_lost_feed_keeps_the_last_frame_in_grey_and_counts_its_age(fed: FedView) -> None:
    fed.show(state_of(sequence(1)))
    fed.disconnect("the server cannot be reached")
    assert fed.root.get_by_text("the server cannot be reached").is_visible()
    assert "grayscale" in fed.root.locator(".tiles").evaluate("tiles => getComputedStyle(tiles).filter")
    fed.root.get_by_text(re.compile(r"^The last frame came \d+ ms ago\.$")).wait_for()
    fed.root.get_by_text(re.compile(r"^The last frame came [1-9][0-9.]* s ago\.$")).wait_for()  # it ticks
    fed.show(state_of(sequence(1)))
    assert fed.root.locator(".tiles").evaluate("tiles => getComputedStyle(tiles).filter") == "none"
    assert not fed.root.get_by_text("The last frame came").is_visible()
    assert fed.rows.count() == 1


def test_loading_server_shows_its_stage(fed: FedView) -> None:
    fed.root.locator("canvas").first.hover()  # there is nothing to describe yet
    fed.show(LiveState(0.0, "loading", "reading weights", "a model", "1.0", [LiveWorker("loading")]))
    fed.wait_for_text("The server is loading: reading weights")


def test_restarted_server_begins_anew(fed: FedView) -> None:
    fed.show(state_of(sequence(1, num_output_tokens=200), steps=[LiveStep(7, 1.0, 0, 30, 30, 0.01)]))
    fed.rows.first.click()
    fed.show(replace(state_of(sequence(1)), now_s=1.0), keep_time=True)
    assert fed.page.evaluate("view.history.get(1).samples.length") == 1
    assert fed.page.evaluate("view.stepHistory.steps.length") == 0
    assert not fed.details.is_visible()


def test_part_that_throws_stops_no_other_and_is_reported_once(browser: Browser, server: ServerProcess) -> None:
    with new_page(browser, allowed="Error: planted") as page:
        fed = FedView(page, server)
        page.evaluate("() => { view.parts.tiles.show = () => { throw new Error('planted'); }; }")
        for number in range(3):
            fed.show(state_of(sequence(number)))
        assert fed.row(2).count() == 1
        message = "There is a bug in the tiles: planted. The rest of the page still works."
        page.locator("#notice").filter(has_text=re.compile(f"^{message}$")).wait_for()


# -- drawing and layout ------------------------------------------------------------------------------------------------


def test_colours_follow_the_scheme(fed: FedView) -> None:
    fed.show(state_of(sequence(5), cells=[(5, 50), (FREE, 50)]))
    light = fed.cell(60)
    try:
        fed.page.emulate_media(color_scheme="dark")
        fed.page.wait_for_function(
            """light => {
                const [x, y] = view.parts.blocks.squareOf(60);
                return pixel(view.parts.blocks.canvas, x + 2, y + 2)[0] < light;
            }""",
            arg=light[0],
        )
        assert fed.cell(60) == fed.colour("free")
    finally:
        fed.page.emulate_media(color_scheme="light")


def test_tiles_fill_their_rows_at_every_width(fed: FedView) -> None:
    fed.show(state_of(sequence(1)))
    # By width of the section: the largest distance of a row's last tile from the right edge of them all.
    gaps = fed.page.evaluate(
        """() => {
            const section = document.getElementById("scheduler");
            const gaps = {};
            for (let width = 300; width < 2000; width += 20) {
                section.style.width = `${width}px`;
                const edge = document.querySelector("#fed .tiles").getBoundingClientRect().right;
                const rights = new Map();
                for (const tile of document.querySelectorAll("#fed .tiles > div")) {
                    const { right, top } = tile.getBoundingClientRect();
                    rights.set(top, Math.max(right, rights.get(top) ?? 0));
                }
                gaps[width] = edge - Math.min(...rights.values());
            }
            section.style.width = "";
            return gaps;
        }"""
    )
    assert len(gaps) == 85
    assert {width: gap for width, gap in gaps.items() if gap > 1.5} == {}


def test_columns_fill_the_width(fed: FedView) -> None:
    fed.show(the_fullest_frame(0))
    measure = """() => {
        const { right } = document.getElementById("fed").getBoundingClientRect();
        const sections = [...document.querySelectorAll("#fed section:not(.details)")];
        return right - Math.max(...sections.map((section) => section.getBoundingClientRect().right));
    }"""
    for width in (800, 1280, 1600, 1920, 2560):
        fed.resize(width)
        assert fed.page.evaluate(measure) <= 1, f"empty at {width} px"


@pytest.mark.parametrize("width", [400, 800, 1280, 1920])
def test_nothing_moves_when_work_starts_or_ends(fed: FedView, width: int) -> None:
    tops = """[...document.querySelectorAll("#fed .tiles, #fed h3, #fed canvas, #fed .sequences")]
        .filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect().top + scrollY)"""
    fed.resize(width)
    idle = fed.show(state_of(), tops)
    working = fed.show(state_of(*map(sequence, range(30)), num_waiting=7), tops)
    assert fed.show(state_of(), tops) == idle == working


def the_fullest_frame(frame: int) -> LiveState:
    """128 sequences, 4,096 cells in as many runs as there can be, and 200 steps; no two frames alike."""
    sequences = [
        sequence(number, num_output_tokens=20 + frame, num_preemptions=frame % 2) for number in range(MAX_SEQUENCES)
    ]
    steps = [LiveStep(frame + number, 1.0, (37 * number) % 2000, 30, 31, 0.06) for number in range(MAX_STEPS)]
    cells = [((number + frame) % MAX_SEQUENCES, 1) for number in range(MAX_CELLS)]
    limits = replace(LIMITS, num_blocks=100_000)
    return state_of(*sequences, steps=steps, cells=cells, blocks_per_cell=25, limits=limits, num_waiting=500)


def test_fullest_frame_is_drawn_before_the_next_one_comes(fed: FedView, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes 10 ms on an idle machine. Anything quadratic takes seconds."""
    frames = [json.loads(encode(replace(the_fullest_frame(frame), now_s=1000.0 + frame))) for frame in range(3)]
    took_ms = fed.page.evaluate(
        """async (frames) => {
            // With the longest history and window of steps, which are the most work.
            const [step] = frames[0].steps;
            view.stepHistory.steps = Array.from({ length: 20_000 }, (_, id) => [id - 20_000, ...step.slice(1)]);
            view.parts.steps.groupSize = 100;
            const took = [];
            for (const frame of frames) {
                const began = performance.now();
                view.showFrame(frame);
                view.draw();
                document.body.offsetHeight;  // and laid out
                took.push(performance.now() - began);
                await new Promise(requestAnimationFrame);
            }
            return took;
        }""",
        frames,
    )
    fastest_ms, median_ms = min(took_ms), sorted(took_ms)[len(took_ms) // 2]
    with capsys.disabled():
        sys.stdout.write(f"\n128 sequences, 4,096 cells: {median_ms:.1f} ms a frame, {fastest_ms:.1f} ms the fastest\n")
    assert fastest_ms < 100  # whatever else the machine did meanwhile


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_is_wider_than_the_window(fed: FedView, width: int) -> None:
    fed.resize(width)
    fed.show(the_fullest_frame(0))
    fed.rows.first.click()
    fed.disconnect("gone " * 50)
    assert fed.page.evaluate("document.documentElement.scrollWidth") <= width
    rights = "[...document.querySelectorAll('#fed *')].map((one) => one.getBoundingClientRect().right)"
    assert max(fed.page.evaluate(rights)) <= width
