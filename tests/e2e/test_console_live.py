"""Claims about the console's live view, in a browser: what it shows of frames that it is given, and of a real server.

Frames are made from the server's own structs, and given to a `Live` of the page's own modules, under the page's own
Content-Security-Policy. What fades does so by the page's clock: tests wait for it to be gone, for as long as it takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Locator, Page, expect

from servekit.live_view import (
    CACHED,
    FENCED,
    FREE,
    MOST_CELLS,
    MOST_SEQUENCES,
    SHARED,
    LiveEnd,
    LiveLimits,
    LiveSequence,
    LiveState,
    LiveStep,
    LiveWorker,
)
from servekit.schemas.decoding import encode
from tests.browser import TIMEOUT_MS, chromium, new_page
from tests.server_process import ServerProcess, serving

LIMITS = LiveLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_total_tokens=16384, num_blocks=100, block_size=16)
HOSTILE = "<img src=x onerror=\"document.title='harmed'\">"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Sixteen answers of 4,000 tokens have room, and take minutes: they are there for as long as somebody looks."""
    log = tmp_path_factory.mktemp("watched") / "log"
    with serving("--model", "sim:step=50ms", "--num-kv-blocks", "8000", log=log) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class FedLive:
    """A Live of the page's, in the place of the one that the server feeds."""

    def __init__(self, page: Page, server: ServerProcess) -> None:
        self.page = page
        self._times = count(1000)
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#live-root.live")  # the page's own is made, and may be put aside
        page.evaluate(
            """async () => {
                const { Live } = await import("/ui/live.js");
                const root = document.createElement("div");
                root.id = "fed";
                document.getElementById("live-root").replaceWith(root);
                window.live = new Live(root);
                window.one = () => new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
                window.pixel = (canvas, x, y) => {
                    const pen = one();
                    pen.drawImage(canvas, -x, -y);
                    return [...pen.getImageData(0, 0, 1, 1).data];
                };
            }"""
        )
        self.root = page.locator("#fed")
        self.rows = page.locator("#fed .bars button:visible")
        self.life = page.get_by_role("dialog")

    def show(self, state: LiveState, seen: str = "null", *, keep_time: bool = False) -> Any:
        """Drawn when this returns. Gives what `seen` is at that moment: a flash is over soon, on a slow machine too."""
        state = state if keep_time else replace(state, now_s=float(next(self._times)))
        draw = f"state => {{ live.show(state); live.draw(); return {seen}; }}"
        return self.page.evaluate(draw, json.loads(encode(state)))

    def row(self, sequence_id: int) -> Locator:
        return self.rows.filter(has=self.page.get_by_text(f"#{sequence_id}", exact=True))

    def pixel(self, part: str, x: float, y: float) -> list[int]:
        """Red, green, blue and opacity, at a place in device pixels."""
        read = "([part, x, y]) => pixel(live.parts[part].canvas, x, y)"
        colour: list[int] = self.page.evaluate(read, [part, x, y])
        return colour

    def colour(self, name: str) -> list[int]:
        """What a canvas makes of a colour of the page's."""
        return self._made_of(f"colour('{name}')")

    def colour_of(self, sequence_id: int) -> list[int]:
        return self._made_of(f"owner({sequence_id})")

    def _made_of(self, colour: str) -> list[int]:
        draw = """() => {
            const pen = one();
            pen.fillStyle = live.parts.grid.COLOUR;
            pen.fillRect(0, 0, 1, 1);
            return [...pen.getImageData(0, 0, 1, 1).data];
        }""".replace("COLOUR", colour)
        seen: list[int] = self.page.evaluate(draw)
        return seen

    def cell(self, index: int) -> list[int]:
        """The colour of a cell of the grid near its upper left corner, off its diagonal and inside of its outline."""
        x, y, side = self.page.evaluate("index => live.parts.grid.square(index)", index)
        return self.pixel("grid", x + side // 4, y + side // 4)


@pytest.fixture
def fed(browser: Browser, server: ServerProcess) -> Iterator[FedLive]:
    with new_page(browser) as page:
        yield FedLive(page, server)


def state_of(*sequences: LiveSequence, **fields: Any) -> LiveState:
    told = {"num_running": len(sequences), "limits": LIMITS, "num_free_blocks": 100, "cells": [(FREE, 100)], **fields}
    workers = [LiveWorker("serving", "cpu", "float32", "pages")]
    return LiveState(0.0, "ready", "", "a model", "1.0", workers, sequences=list(sequences), **told)


def sequence(
    sequence_id: int, state: Literal["waiting", "prefill", "decode"] = "decode", num_computed: int = 120, **fields: Any
) -> LiveSequence:
    told = {"num_prompt_tokens": 100, "num_output_tokens": 21, "max_tokens": 256, "arrival_s": 990.0, **fields}
    return LiveSequence(sequence_id, state, num_computed_tokens=num_computed, **told)


def ended(sequence_id: int, reason: str = "length") -> LiveEnd:
    told = {"num_prompt_tokens": 100, "num_output_tokens": 30, "max_tokens": 30}
    return LiveEnd(sequence_id, reason, **told, arrival_s=990.0, ended_s=1000.0)


def test_16_copies_of_a_prompt_are_16_bars_until_their_client_leaves(browser: Browser, server: ServerProcess) -> None:
    asked = {"prompt": "x" * 100, "n": 16, "max_tokens": 4000, "stream": True}
    with new_page(browser) as page:
        page.goto(server.url)
        rows = page.locator("#live-root .bars button:visible")
        expect(page.locator("#live-root")).to_contain_text("Nothing runs", timeout=TIMEOUT_MS)
        with server.client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200
            expect(rows).to_have_count(16, timeout=TIMEOUT_MS)
            expect(rows.filter(has_text="decode")).to_have_count(16, timeout=TIMEOUT_MS)
            expect(page.locator(".legend .shared")).not_to_have_text("shared 0", timeout=TIMEOUT_MS)
        expect(page.locator("#live-root")).to_contain_text("Nothing runs", timeout=TIMEOUT_MS)
        expect(page.locator("#live-root .bars button:visible:not(.ended)")).to_have_count(0, timeout=TIMEOUT_MS)


def test_a_preempted_sequence_flashes_and_then_does_not(fed: FedLive) -> None:
    flashing = "[...document.querySelectorAll('#fed .flash')].map((row) => row.innerText.split(/\\s+/))"
    # The one of sequence 2 was before anybody looked.
    assert fed.show(state_of(sequence(1), sequence(2, num_preemptions=1)), flashing) == []
    preempted = state_of(sequence(1, "waiting", 0, num_preemptions=1), sequence(2, num_preemptions=1))
    assert fed.show(preempted, flashing) == [["#1", "preempted", "0/121"]]
    fed.page.evaluate("() => { live.lives.get(1).preemptedAt -= 1500; }")  # ms that nobody needs to wait for
    expect(fed.page.locator("#fed .flash")).to_have_count(0, timeout=TIMEOUT_MS)
    assert fed.show(preempted, flashing) == []


def test_who_wants_no_motion_sees_a_mark_instead(browser: Browser, server: ServerProcess) -> None:
    with new_page(browser, reduced_motion="reduce") as page:
        fed = FedLive(page, server)
        fed.show(state_of(sequence(1)))
        style = "getComputedStyle(document.querySelector('#fed .flash'))"
        preempted = state_of(sequence(1, "waiting", 0, num_preemptions=1))
        motion, mark = fed.show(preempted, f"[{style}.animationName, {style}.boxShadow]")
        assert motion == "none"
        assert mark != "none"


def test_a_row_keeps_its_place_and_its_element_as_long_as_its_sequence_lives(fed: FedLive) -> None:
    fed.show(state_of(*map(sequence, range(4))))
    fed.page.evaluate("() => { window.before = [...document.querySelectorAll('#fed .bars button')]; }")
    places = [fed.row(number).bounding_box() for number in (0, 2, 3)]
    # Preempted, or of another rank now. Who has ended is seen for a while, and its place stays empty.
    seen = "[...document.querySelectorAll('#fed .ended')].map((row) => row.innerText.split(/\\s+/))"
    others = (sequence(3), sequence(2), sequence(0))
    assert fed.show(state_of(*others, ended=[ended(1)]), seen) == [["#1", "length", "30/256"]]
    fed.page.evaluate("() => { live.parts.bars.rows[1].endedAt -= 3000; }")  # ms that nobody needs to wait for
    expect(fed.rows).to_have_count(3, timeout=TIMEOUT_MS)
    assert [fed.row(number).bounding_box() for number in (0, 2, 3)] == places
    fed.show(state_of(*others, sequence(4)))  # the next one has the place that is free
    now = "[...document.querySelectorAll('#fed .bars button')].every((button, index) => button === before[index])"
    assert fed.page.evaluate(now)
    assert [text.split()[0] for text in fed.rows.all_inner_texts()] == ["#0", "#4", "#2", "#3"]


def test_who_came_and_went_between_two_frames_has_a_row_and_a_life(fed: FedLive) -> None:
    now_s = 1000.5
    fed.show(replace(state_of(ended=[ended(7), replace(ended(3), ended_s=999.0)]), now_s=now_s), keep_time=True)
    assert [text.split() for text in fed.rows.all_inner_texts()] == [["#7", "length", "30/30"]]  # 3 was before our time
    fed.row(7).click()
    expect(fed.life).to_contain_text("generated 30 of at most 30", timeout=TIMEOUT_MS)
    fed.page.keyboard.press("Escape")
    leave = "document.activeElement.blur(); live.parts.bars.rows[0].endedAt -= 3000; live.wake(0);"
    fed.page.evaluate(f"() => {{ {leave} }}")
    expect(fed.rows).to_have_count(0, timeout=TIMEOUT_MS)
    fed.show(replace(state_of(ended=[ended(7)]), now_s=now_s), keep_time=True)
    assert fed.rows.count() == 0, "once"


def test_who_asked_finds_their_own(fed: FedLive) -> None:
    # Of all that they asked for, the last 64 are kept.
    fed.page.evaluate("() => { for (let number = 0; number < 70; number++) live.mine(`before-${number}`); }")
    fed.page.evaluate("live.mine('request-7')")
    assert fed.page.evaluate("live.requests.size") == 64
    fed.show(state_of(sequence(1, request_id="request-7"), sequence(2, request_id="request-8"), sequence(3)))
    assert [("yours" in text) for text in fed.rows.all_inner_texts()] == [True, False, False]
    assert "yours" in (fed.rows.first.get_attribute("aria-label") or "")


def test_those_beyond_what_a_frame_tells_are_counted(fed: FedLive) -> None:
    fed.show(state_of(sequence(1), num_waiting=1500))
    expect(fed.root.get_by_text("and 1,500 more wait")).to_be_visible()


def test_a_life_opens_and_closes_by_keyboard_and_tells_the_numbers(fed: FedLive) -> None:
    told = {"num_cached_tokens": 64, "num_blocks": 9, "first_scheduled_s": 990.25, "first_token_s": 991.5}
    other = sequence(1)
    for num_output in (21, 31, 41):  # a second apart
        alive = sequence(2, "decode", 99 + num_output, num_output_tokens=num_output, **told)
        fed.show(state_of(other, alive))
    fed.rows.first.focus()
    fed.page.keyboard.press("ArrowDown")
    fed.page.keyboard.press("Enter")
    expect(fed.life).to_be_visible()
    assert fed.life.locator("p").inner_text().splitlines() == [
        "arrived 12.0 s ago",
        "waited 250 ms",
        "first token after 1.5 s",
        "now 10.0 tokens/s",
        "prompt of 100 tokens, 64 in the cache",
        "prefilled 100",
        "generated 41 of at most 256",
        "blocks 9",
        "preemptions 0",
        "not ended",
    ]
    fed.show(state_of(other, replace(alive, state="waiting", num_computed_tokens=0, num_preemptions=1)))
    expect(fed.life).to_contain_text("140 to compute again")
    fed.show(state_of(other, ended=[ended(2, "stop")]))
    expect(fed.life).to_contain_text("ended after 10.0 s: stop")
    fed.page.evaluate("() => { live.parts.bars.rows[1].endedAt = -1e9; }")  # longer ago than it is shown for
    fed.page.evaluate(
        "() => { window.heard = []; document.addEventListener('keydown', ({ key }) => heard.push(key)); }"
    )
    fed.page.keyboard.press("Escape")
    expect(fed.life).to_be_hidden()
    assert fed.page.evaluate("heard") == []  # or it would stop what the form streams
    assert fed.page.evaluate("document.activeElement.textContent.startsWith('#2')")


def test_a_long_life_takes_no_more_room_than_a_short_one(fed: FedLive) -> None:
    state = json.loads(encode(state_of(sequence(1))))
    late = fed.page.evaluate(
        """state => {
            for (let frame = 0; frame < 1000; frame++) live.lives.note({ ...state, now_s: frame / 10 });
            return live.lives.get(1).late;
        }""",
        state,
    )
    assert late[-1][0] == 99.9
    assert 19 <= len(late) <= 21  # of two seconds


def test_rows_are_bounded_however_many_sequences_come_and_go(fed: FedLive) -> None:
    """Each frame has others than the one before, and each of them is seen."""
    for first in range(0, 6 * MOST_SEQUENCES, MOST_SEQUENCES):
        ids = range(first, first + MOST_SEQUENCES)
        seen = "live.parts.bars.taken().filter((row) => row.endedAt === Infinity).map((row) => row.id)"
        assert sorted(fed.show(state_of(*map(sequence, ids)), seen)) == list(ids)
        assert fed.page.evaluate("live.parts.bars.rows.length") <= 2 * MOST_SEQUENCES


def test_what_is_remembered_of_those_who_are_gone_is_bounded(fed: FedLive) -> None:
    for first in range(0, 600, 100):
        fed.show(state_of(*map(sequence, range(first, first + 100))))
        fed.page.evaluate("first => { if (!first) live.select(7); }", first)
    remembered = fed.page.evaluate("[...live.lives.keys()]")
    assert len(remembered) <= 256
    assert set(remembered) >= {7, *range(500, 600)}  # whose life is open, and who lives


def test_a_step_is_drawn_in_the_colours_of_its_tokens(fed: FedLive) -> None:
    prefill, decode = LiveStep(7, 1.0, 2018, 30, 31, 0.061), LiveStep(8, 1.1, 0, 30, 30, 0.009)
    fed.show(state_of(sequence(1), steps=[prefill, decode]))
    (left, wide), (right, _) = (fed.page.evaluate(f"live.parts.strip.column({index})") for index in (0, 1))
    height = fed.page.evaluate("live.parts.strip.canvas.height")
    assert fed.pixel("strip", left, height // 3) == fed.colour("prefill")
    assert fed.pixel("strip", right, height // 3) == [0, 0, 0, 0]
    for x in (left, right):
        assert fed.pixel("strip", x, height - 10) == fed.colour("decode")
    assert left + wide <= right
    line = fed.root.get_by_role("slider", name="Steps")
    line.focus()
    for key in ("ArrowLeft", "ArrowLeft"):
        fed.page.keyboard.press(key)
    words = "Step 7: 2,018 prefill + 30 decode tokens, 31 sequences, 61 ms"
    assert line.get_attribute("aria-valuetext") == words
    expect(line).to_have_text(words)


def test_a_cell_has_its_owners_colour_and_what_is_shared_another(fed: FedLive) -> None:
    cells = [(5, 10), (6, 10), (SHARED, 10), (CACHED, 10), (FENCED, 10), (FREE, 50)]
    fed.show(state_of(sequence(5), sequence(6), cells=cells))
    seen = [fed.cell(first) for first in (0, 10, 20, 30, 50)]
    others = [fed.colour(name) for name in ("shared", "cached", "free")]
    assert seen == [fed.colour_of(5), fed.colour_of(6), *others]
    assert len({tuple(colour) for colour in seen}) == 5
    x, y, side = fed.page.evaluate("live.parts.grid.square(25)")
    assert fed.pixel("grid", x + side // 2, y + side // 2) != fed.colour("shared")  # its diagonal
    x, y, _ = fed.page.evaluate("live.parts.grid.square(45)")
    assert fed.pixel("grid", x, y) == fed.colour("fenced")
    expect(fed.root.locator(".legend .owned")).to_have_text("owned 20")

    x, y, side = fed.page.evaluate("live.parts.grid.square(12)")
    fed.root.locator("canvas").nth(1).click(position={"x": x + side / 2, "y": y + side / 2})
    expect(fed.life).to_contain_text("Sequence 6")
    assert fed.cell(12) == fed.colour_of(6)
    assert fed.cell(2) != fed.colour_of(5)  # paler: somebody else's


def test_cells_of_several_blocks_say_so(fed: FedLive) -> None:
    limits = replace(LIMITS, num_blocks=100_000)
    fed.show(state_of(limits=limits, cells=[(3, 4000)], blocks_per_cell=25))
    expect(fed.root).to_contain_text("100,000, a cell is 25 of them")
    expect(fed.root.locator(".legend .owned")).to_have_text("owned 4,000 cells")
    line = fed.root.get_by_role("slider", name="KV blocks")
    line.focus()
    for key in ("ArrowRight", "ArrowRight"):
        fed.page.keyboard.press(key)
    assert line.get_attribute("aria-valuetext") == "Block 25 to 49: of sequence 3"


def test_pictures_have_a_text_in_their_place(fed: FedLive) -> None:
    steps = [LiveStep(1, 1.0, 2000, 48, 49, 0.061), LiveStep(2, 1.1, 0, 30, 30, None)]
    fed.show(state_of(sequence(1), steps=steps))
    for words in ("2,000 prefill and 78 decode tokens", "Blocks: owned 0"):
        assert words in " ".join(
            canvas.get_attribute("aria-label") or "" for canvas in fed.root.locator("canvas").all()
        )
    assert all(canvas.get_attribute("role") == "img" for canvas in fed.root.locator("canvas").all())
    assert fed.root.locator("[aria-live]").count() == 0


def test_what_anybody_sent_is_text(fed: FedLive) -> None:
    hostile = sequence(1, request_id=HOSTILE)
    fed.page.evaluate("id => live.mine(id)", HOSTILE)
    worker = LiveWorker(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    fed.show(replace(state_of(hostile), model_name=HOSTILE, version=HOSTILE, workers=[worker]))
    fed.rows.first.click()
    fed.show(replace(state_of(ended=[ended(1, HOSTILE)]), state=HOSTILE, stage=HOSTILE))
    expect(fed.life).to_contain_text(f"Sequence 1: {HOSTILE}")
    fed.page.evaluate("words => { live.lost(words); live.draw(); }", HOSTILE)
    expect(fed.root).to_contain_text(HOSTILE)
    assert fed.root.locator("img").count() == 0
    assert "harmed" not in fed.page.title()


def test_a_feed_that_is_gone_leaves_what_was_seen_in_grey(fed: FedLive) -> None:
    fed.show(state_of(sequence(1)))
    fed.page.evaluate("live.lost('the server cannot be reached')")
    expect(fed.root.get_by_text("the server cannot be reached")).to_be_visible()
    expect(fed.root.get_by_text("The last frame came")).to_be_visible()
    assert fed.root.evaluate("root => root.classList.contains('lost')")
    fed.show(state_of(sequence(1)))
    assert not fed.root.evaluate("root => root.classList.contains('lost')")
    assert fed.rows.count() == 1


def test_a_server_that_loads_says_at_what(fed: FedLive) -> None:
    fed.root.locator("canvas").first.hover()  # of which there is nothing to tell yet
    state = LiveState(0.0, "loading", "reading weights", "a model", "1.0", [LiveWorker("loading")])
    fed.show(state)
    expect(fed.root).to_contain_text("The server is loading: reading weights")


def test_another_server_begins_anew(fed: FedLive) -> None:
    fed.show(state_of(sequence(1, num_output_tokens=200)))
    fed.rows.first.click()
    fed.show(replace(state_of(sequence(1)), now_s=1.0), keep_time=True)
    assert fed.page.evaluate("live.lives.get(1).late.length") == 1
    expect(fed.life).to_be_hidden()


def test_a_part_that_throws_stops_no_other_and_is_told_once(browser: Browser, server: ServerProcess) -> None:
    with new_page(browser, may_say="Error: planted") as page:
        fed = FedLive(page, server)
        page.evaluate("() => { live.parts.tiles.show = () => { throw new Error('planted'); }; }")
        for number in range(3):
            fed.show(state_of(sequence(number)))
        assert fed.row(2).count() == 1
        expect(page.get_by_text("There is a bug in the tiles: planted")).to_be_visible()


def test_the_colours_follow_the_scheme(fed: FedLive) -> None:
    fed.show(state_of(sequence(5), cells=[(5, 50), (FREE, 50)]))
    light = fed.cell(60)
    fed.page.emulate_media(color_scheme="dark")
    fed.page.wait_for_function(
        """light => {
            const [x, y] = live.parts.grid.square(60);
            return pixel(live.parts.grid.canvas, x + 2, y + 2)[0] < light;
        }""",
        arg=light[0],
        timeout=TIMEOUT_MS,
    )
    assert fed.cell(60) == fed.colour("free")


def the_most(frame: int) -> LiveState:
    """128 sequences, 4,096 cells in as many runs as there can be, and 200 steps; no two frames alike."""
    sequences = [
        sequence(number, num_output_tokens=20 + frame, num_preemptions=frame % 2) for number in range(MOST_SEQUENCES)
    ]
    steps = [LiveStep(frame + number, 1.0, (37 * number) % 2000, 30, 31, 0.06) for number in range(200)]
    cells = [((number + frame) % MOST_SEQUENCES, 1) for number in range(MOST_CELLS)]
    limits = replace(LIMITS, num_blocks=100_000)
    return state_of(*sequences, steps=steps, cells=cells, blocks_per_cell=25, limits=limits, num_waiting=500)


def test_the_fullest_frame_is_drawn_before_the_next_one_comes(fed: FedLive, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes 10 ms where nothing else runs; what is quadratic in anything takes seconds."""
    frames = [json.loads(encode(replace(the_most(frame), now_s=1000.0 + frame))) for frame in range(5)]
    took_ms = fed.page.evaluate(
        """async (frames) => {
            const took = [];
            for (const frame of frames) {
                const began = performance.now();
                live.show(frame);
                live.draw();
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
def test_nothing_is_wider_than_the_window(browser: Browser, server: ServerProcess, width: int) -> None:
    with new_page(browser, width=width, height=900) as page:
        fed = FedLive(page, server)
        fed.show(the_most(0))
        fed.rows.first.click()
        fed.page.evaluate("words => { live.lost(words); live.draw(); }", "gone " * 50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        rights = "[...document.querySelectorAll('#fed *')].map((one) => one.getBoundingClientRect().right)"
        assert max(page.evaluate(rights)) <= width
