"""Claims about the view of `servekit top`: it fits, it shows the frame's figures, and hostile text is harmless."""

from __future__ import annotations

import io
import unicodedata

import pytest
from rich.cells import cell_len
from rich.console import Console, Group

from servekit.observability.live_frames import (
    CACHED,
    FENCED,
    FREE,
    SHARED,
    LiveAdapters,
    LiveEnd,
    LiveLimits,
    LiveSequence,
    LiveState,
    LiveStep,
    LiveWorker,
)
from servekit.terminal.drawing import draw

LIMITS = LiveLimits(max_num_seqs=8, max_num_batched_tokens=2048, max_total_tokens=4096, num_blocks=64, block_size=16)
SIZES = [(80, 24), (250, 60), (100, 30), (40, 12), (20, 5), (1, 1)]
HOSTILE_TEXT = "\x1b]0;x\x07\u202e\n\x9b2J" + "漢" * 300


def sequence(sequence_id: int, **fields: object) -> LiveSequence:
    usual = {
        "state": "decode",
        "num_prompt_tokens": 100,
        "num_computed_tokens": 100,
        "num_output_tokens": 50,
        "max_tokens": 100,
        "arrival_s": 1.0,
    }
    return LiveSequence(sequence_id=sequence_id, **{**usual, **fields})  # type: ignore[arg-type]


def state(**fields: object) -> LiveState:
    usual = {
        "now_s": 3.0,
        "state": "ready",
        "stage": "serving",
        "model_name": "demo",
        "version": "1.2",
        "workers": [LiveWorker("serving", "cpu", "float32")],
        "limits": LIMITS,
    }
    return LiveState(**{**usual, **fields})  # type: ignore[arg-type]


BUSY = state(
    num_running=3,
    num_waiting=500,
    num_free_blocks=30,
    num_cached_blocks=4,
    tokens_per_s=85.25,
    num_prompt_tokens=200,
    num_cached_tokens=50,
    ttft_p50_s=0.021,
    ttft_p95_s=1.5,
    steps=[LiveStep(step, float(step), step * 20 % 2048, step % 9, 3, 0.02) for step in range(200)],
    sequences=[sequence(number, num_preemptions=number % 3) for number in range(128)],
    ended=[LiveEnd(-1 - number, "stop", 5, 6, 6, 0.0, 1.0) for number in range(64)],
    adapters=LiveAdapters(12, 2, [("sql", 3), ("support", 1)]),
    cells=[(0, 20), (SHARED, 5), (FENCED, 2), (CACHED, 4), (1, 3), (FREE, 30)],
)
HOSTILE = state(
    state=HOSTILE_TEXT,
    stage=HOSTILE_TEXT,
    model_name=HOSTILE_TEXT,
    version=HOSTILE_TEXT,
    workers=[LiveWorker(HOSTILE_TEXT, HOSTILE_TEXT, HOSTILE_TEXT, HOSTILE_TEXT, host=HOSTILE_TEXT)] * 50,
    adapters=LiveAdapters(-1, 10**30, [(HOSTILE_TEXT, -5)] * 50),
    limits=LiveLimits(-1, 0, 0, 0, 0),
    num_running=-5,
    steps=[LiveStep(0, 0.0, 10**30, -(10**30), 0, None)],
    sequences=[
        sequence(-(10**20), num_prompt_tokens=-5, max_tokens=-5, num_output_tokens=-(10**9)),
        sequence(1, num_prompt_tokens=10**30, num_computed_tokens=10**40, num_cached_tokens=10**40, max_tokens=10**30),
    ],
    ended=[LiveEnd(0, HOSTILE_TEXT, 0, 0, 0, 0.0, 1e300)],
    cells=[(10**30, 10**30), (-99, 5), (FREE, -3)],
)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(
    "shown", [BUSY, HOSTILE, state(), state(limits=None)], ids=["busy", "hostile", "idle", "loading"]
)
def test_the_view_fits_the_terminal_and_has_no_control_characters(shown: LiveState, width: int, height: int) -> None:
    lines = draw(shown, width, height, HOSTILE_TEXT)
    assert len(lines) <= height
    assert max(cell_len(line.plain) for line in lines) <= width
    for line in lines:
        assert not any(unicodedata.category(character) in ("Cc", "Cf") for character in line.plain)


def test_adapters_that_have_requests_are_named() -> None:
    text = "\n".join(line.plain for line in draw(BUSY, 120, 40))
    assert "adapters 12" in text and "sql 3" in text and "support 1" in text and "waiting for a place 2" in text
    assert "adapters" not in "\n".join(line.plain for line in draw(state(), 120, 40))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_printed_output_is_no_wider_and_higher_than_the_terminal(width: int, height: int) -> None:
    """Colours are off, so every byte is visible."""
    written = io.StringIO()
    console = Console(file=written, width=width, height=height, force_terminal=True, no_color=True, color_system=None)
    console.print(Group(*draw(HOSTILE, width, height)))
    assert "\x1b" not in written.getvalue()
    assert all(cell_len(line) <= width for line in written.getvalue().splitlines())
    assert written.getvalue().count("\n") <= height


def test_the_view_shows_the_figures_of_the_frame() -> None:
    shown = "\n".join(line.plain for line in draw(BUSY, 120, 40))
    for words in (
        "servekit 1.2",
        "demo",
        "ready",
        "tok/s 85.2",
        "running 3",
        "waiting 500",
        "KV 47%",
        "prefix hits 25%",
        "TTFT p50 21 ms",
        "p95 1.5 s",
        "worker: serving cpu float32",
        "30 of 64 held",
        "of 2,048 tokens",
        "preempted 2",
    ):
        assert words in shown


def test_each_replica_has_its_worker_with_the_host_that_it_joined_from() -> None:
    workers = [
        LiveWorker("serving", "cuda:0", "bfloat16", "paged", 3, 1, 64, 32),
        LiveWorker("serving", "cuda:1", "bfloat16", "paged", 2, 0, 64, 64, host="gpu-7"),
        LiveWorker("waiting for a worker to join at unix:/w"),
    ]
    shown = "\n".join(line.plain for line in draw(state(workers=workers), 120, 40))
    for words in (
        "replica 0: serving cuda:0 bfloat16 paged running 3 waiting 1 KV 50%",
        "replica 1: serving cuda:1 on gpu-7 bfloat16 paged running 2 waiting 0 KV 0%",
        "replica 2: waiting for a worker to join at unix:/w running 0",
    ):
        assert words in shown


def test_a_bar_shows_each_part_in_proportion() -> None:
    one = sequence(7, num_prompt_tokens=200, num_cached_tokens=100, num_computed_tokens=150, num_output_tokens=0)
    other = sequence(8, num_output_tokens=100)
    drawn = [line.plain for line in draw(state(sequences=[one, other]), 120, 40)]
    (first,) = (line for line in drawn if line.startswith("     7 "))
    (second,) = (line for line in drawn if line.startswith("     8 "))
    counts = [first.count(mark) for mark in "▓▒░█·"]
    assert counts[0] > 0 and counts[3] == 0
    assert counts[0] == pytest.approx(2 * counts[1], abs=1) == pytest.approx(2 * counts[2], abs=2)
    assert counts[4] == pytest.approx(counts[0], abs=1)
    assert second.count("█") == pytest.approx(second.count("▒"), abs=1) and "·" not in second


def test_prefill_and_decode_differ_without_colours() -> None:
    steps = [LiveStep(0, 0.0, 0, 2048, 1, 0.1), LiveStep(1, 0.1, 2048, 0, 1, 0.1), LiveStep(2, 0.2, 2000, 1, 1, 0.1)]
    drawn = [line.plain for line in draw(state(steps=steps), 80, 24)]
    begin = next(index for index, line in enumerate(drawn) if line.startswith("steps"))
    columns = ["".join(column) for column in zip(*drawn[begin + 1 : begin + 4], strict=True)]
    assert columns == ["███", "▒▒▒", "▒▒█"]


def test_blocks_of_different_owners_have_different_colours() -> None:
    (row,) = (line for line in draw(BUSY, 80, 24) if line.plain.startswith("█" * 20))
    assert row.plain.startswith("█" * 20 + "▓" * 5 + "xx" + "▒" * 4 + "███" + "·")
    first, last = row.get_style_at_offset(Console(), 0), row.get_style_at_offset(Console(), 32)
    assert first.color != last.color


def test_sequences_without_room_are_counted() -> None:
    drawn = draw(BUSY, 80, 24)
    num_drawn = sum("TTFT" in line.plain or "waits" in line.plain for line in drawn[12:])
    assert drawn[-1].plain.strip() == f"and {503 - num_drawn:,} more"


def test_a_warning_is_shown_at_the_top() -> None:
    assert draw(BUSY, 80, 24, "no server answers")[1].plain == "no server answers"


def test_accepted_drafts_are_shown_where_there_are_any() -> None:
    one = sequence(7, num_output_tokens=100, num_accepted_tokens=50)
    fields = {"num_draft_steps": 100, "num_drafted_tokens": 200, "num_accepted_tokens": 150}
    drawn = [line.plain for line in draw(state(sequences=[one], **fields), 120, 40)]
    shown = "\n".join(drawn)
    assert "drafts accepted 75%" in shown and "tokens/step 2.50" in shown
    (bar,) = (line for line in drawn if line.startswith("     7 "))
    assert bar.count("◆") > 0
    assert bar.count("◆") == pytest.approx(bar.count("█"), abs=1)
    assert not any("draft" in line.plain for line in draw(BUSY, 120, 40))
