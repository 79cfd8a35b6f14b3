"""A frame of the live view as lines for a terminal of any size: no clock, no I/O, and no word unchecked.

From top to bottom: what the server is, its figures, the last steps as a strip, the KV blocks as a grid, and as many
sequences as there is room for. Each kind of thing has a character of its own beside its colour, for those who see no
colours or want none.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from rich.text import Text

from servekit.live_view import (
    CACHED,
    FENCED,
    FREE,
    MOST_CELLS,
    SHARED,
    LiveEnd,
    LiveLimits,
    LiveSequence,
    LiveState,
    LiveStep,
)
from servekit.terminal.safe_text import safe_line

_INK, _MUTED, _TITLE = Style(), Style(dim=True), Style(bold=True)
_GOOD, _WARN, _BAD = Style(color="green"), Style(color="yellow"), Style(color="red", bold=True)
_DECODE, _PREFILL, _FOUND = Style(color="bright_blue"), Style(color="yellow"), Style(color="cyan")
_STATE_STYLE = {"ready": _GOOD, "failed": _BAD}

Mark = tuple[str, Style]
_GENERATED, _PREFILLED, _CACHED_PROMPT = ("█", _DECODE), ("▒", _PREFILL), ("▓", _FOUND)
_TO_PREFILL, _TO_COME = ("░", _MUTED), ("·", _MUTED)
_CELLS: dict[int, Mark] = {
    FREE: ("·", _MUTED),
    CACHED: ("▒", _FOUND),
    SHARED: ("▓", Style(color="magenta")),
    FENCED: ("x", Style(color="red")),
}
_EIGHTHS = " ▁▂▃▄▅▆▇"
_GOLDEN_ANGLE = 137.508 / 360
_NARROWEST_BAR = 8


def draw(state: LiveState, width: int, height: int, trouble: str = "") -> list[Text]:
    """Lines that fill a terminal at most: none is wider than `width`, and there are `height` or fewer."""
    lines = [_title(state, width)]
    if trouble:
        lines.append(Text(safe_line(trouble), _BAD))
    lines += _flow(_figures(state), width)
    lines += _flow([Text(f"worker: {words}", _MUTED) for words in _workers(state)], width)
    if (limits := state.limits) is not None:
        # 24 lines leave some ten for sequences; from 60 on strip and grid have what they can use.
        num_rows = min(max(height // 8, 2), 8)
        if height >= 14:
            lines += [Text(), *_strip(state.steps, limits, width, num_rows)]
            lines += [Text(), *_blocks(state, limits, width, num_rows - 1)]
        lines += [Text(), *_sequences(state, width, height - len(lines) - 1)]
    return [_cut(line, width) for line in lines[:height]]


# -- what the server is ------------------------------------------------------------------------------------------------


def _title(state: LiveState, width: int) -> Text:
    name = safe_line(state.state)
    title = Text.assemble(
        (f"servekit {safe_line(state.version)}  ", _MUTED),
        (safe_line(state.model_name), _TITLE),
        "  ",
        (name, _STATE_STYLE.get(name, _WARN)),
    )
    if state.stage and state.state != "ready":
        title.append(f"  {safe_line(state.stage)}")
    leaves = "q leaves"
    if (gap := width - title.cell_len - len(leaves)) > 1:
        title.append(" " * gap + leaves, _MUTED)
    return title


def _figures(state: LiveState) -> list[Text]:
    figures = [
        ("tok/s", f"{state.tokens_per_s:,.1f}"),
        ("running", f"{state.num_running:,}"),
        ("waiting", f"{state.num_waiting:,}"),
    ]
    if state.limits is not None:
        num_used = state.limits.num_blocks - state.num_free_blocks - state.num_cached_blocks
        figures.append(("KV", _percent(num_used, state.limits.num_blocks)))
    figures += [
        ("prefix hits", _percent(state.num_cached_tokens, state.num_prompt_tokens)),
        ("TTFT p50", _duration(state.ttft_p50_s)),
        ("p95", _duration(state.ttft_p95_s)),
        ("preempted", f"{state.num_preemptions:,}"),
        ("tokens", f"{state.num_generated_tokens:,}"),
    ]
    return [Text.assemble((f"{name} ", _MUTED), (value, _TITLE)) for name, value in figures]


def _workers(state: LiveState) -> list[str]:
    return [
        " ".join(safe_line(word) for word in (worker.state, worker.device, worker.dtype, worker.attention) if word)
        for worker in state.workers
    ]


def _flow(parts: Iterable[Text], width: int) -> list[Text]:
    """Parts side by side, in as many lines as they need."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 3 + part.cell_len <= width:
            lines[-1].append("   ").append_text(part)
        else:
            lines.append(part.copy())
    return lines


# -- steps -------------------------------------------------------------------------------------------------------------


def _strip(steps: list[LiveStep], limits: LiveLimits, width: int, num_rows: int) -> list[Text]:
    """The last steps, newest at the right; a column is as high as the step's part of the token budget."""
    budget = limits.max_num_batched_tokens
    shown = steps[-width:]
    heading = Text.assemble(
        ("steps ", _TITLE), _GENERATED, (" decode ", _MUTED), _PREFILLED, (f" prefill, of {budget:,} tokens", _MUTED)
    )
    if shown and (duration_s := shown[-1].duration_s) is not None:
        heading.append(f"; the last took {_duration(duration_s)}", _MUTED)
    columns = [_column(step, budget, num_rows) for step in shown]
    if not columns:
        return [heading, Text("none yet", _MUTED)]
    return [heading, *(_run(column[row] for column in columns) for row in reversed(range(num_rows)))]


def _column(step: LiveStep, budget: int, num_rows: int) -> list[Mark]:
    """From the bottom up: decode, then prefill, in rows that are one or the other. Of both, something can be seen."""
    most = num_rows * 8
    decode, prefill = (
        min(max(num_tokens * most // max(budget, 1), num_tokens > 0), most)
        for num_tokens in (step.num_decode_tokens, step.num_prefill_tokens)
    )
    if decode and prefill:
        num_decode_rows = min(max(round(decode / 8), 1), num_rows - 1)
        total = min(max(decode + prefill, num_decode_rows * 8 + 1), most)
    else:
        num_decode_rows = num_rows if decode else 0
        total = decode + prefill
    column: list[Mark] = []
    for row in range(num_rows):
        kind = _GENERATED if row < num_decode_rows else _PREFILLED
        above = total - row * 8
        column.append(kind if above >= 8 else (_EIGHTHS[max(above, 0)], kind[1]))
    return column


# -- blocks ------------------------------------------------------------------------------------------------------------


def _blocks(state: LiveState, limits: LiveLimits, width: int, num_rows: int) -> list[Text]:
    cells = _cells(state.cells)
    held = limits.num_blocks - state.num_free_blocks - state.num_cached_blocks
    heading = Text.assemble(
        ("KV blocks ", _TITLE),
        (f"{held:,} of {limits.num_blocks:,} held  ", _MUTED),
        ("█", _owner_style(0)),
        (" by one sequence ", _MUTED),
        _CELLS[SHARED],
        (" by several ", _MUTED),
        _CELLS[CACHED],
        (f" cached {state.num_cached_blocks:,} ", _MUTED),
        _CELLS[FENCED],
        (" fenced ", _MUTED),
        _CELLS[FREE],
        (f" free {state.num_free_blocks:,}", _MUTED),
    )
    num_places = max(width * num_rows, 1)
    if len(cells) > num_places:
        edges = [place * len(cells) // num_places for place in range(num_places + 1)]
        cells = [_foremost(cells[begin:end]) for begin, end in pairwise(edges)]
    rows = [_run(map(_cell, cells[begin : begin + width])) for begin in range(0, len(cells), max(width, 1))]
    return [heading, *rows]


def _cells(runs: list[tuple[int, int]]) -> list[int]:
    cells: list[int] = []
    for kind, count in runs:
        cells += [kind] * min(max(count, 0), MOST_CELLS - len(cells))
    return cells


def _foremost(cells: list[int]) -> int:
    """What is drawn where several cells share a place: whatever is the most of them that is in use."""
    in_use = [kind for kind in cells if kind != FREE]
    return max(set(in_use), key=in_use.count) if in_use else FREE


def _cell(kind: int) -> Mark:
    return _CELLS.get(kind) or ("█", _owner_style(kind))


@lru_cache(maxsize=4096)
def _owner_style(sequence_id: int) -> Style:
    """Neighbours in time are far apart in hue; the same hues as the console's."""
    red, green, blue = colorsys.hls_to_rgb(sequence_id * _GOLDEN_ANGLE % 1, 0.55, 0.65)
    return Style(color=Color.from_rgb(red * 255, green * 255, blue * 255))


# -- sequences ---------------------------------------------------------------------------------------------------------


def _sequences(state: LiveState, width: int, num_rows: int) -> list[Text]:
    heading = Text.assemble(
        *(("sequences ", _TITLE), _CACHED_PROMPT, (" found ", _MUTED), _PREFILLED, (" prefilled ", _MUTED)),
        *(_TO_PREFILL, (" to prefill ", _MUTED), _GENERATED, (" generated ", _MUTED), _TO_COME, (" to come", _MUTED)),
    )
    num_rows -= 1
    shown = state.sequences[: max(num_rows, 0)]
    num_alive = max(state.num_running + state.num_waiting, len(state.sequences))
    if num_alive > len(shown) == num_rows > 0:
        shown = shown[:-1]  # for the line that counts the others
    rows = [_sequence(sequence, state.now_s, width) for sequence in shown]
    if num_alive > len(shown):
        rows.append(Text(f"and {num_alive - len(shown):,} more", _MUTED))
    if not rows:
        rows.append(Text("nobody asks", _MUTED))
    rows += [_end(ended) for ended in reversed(state.ended)][: max(num_rows - len(rows), 0)]
    return [heading, *rows]


def _sequence(sequence: LiveSequence, now_s: float, width: int) -> Text:
    line = Text.assemble(
        (f"{sequence.sequence_id:>6} ", _owner_style(sequence.sequence_id)),
        (f"{safe_line(sequence.state):<7} ", _MUTED if sequence.state == "waiting" else _INK),
    )
    told = f" {sequence.num_prompt_tokens:,} + {sequence.num_output_tokens:,} / {sequence.max_tokens:,}"
    waited_s = (sequence.first_token_s or now_s) - sequence.arrival_s
    told = f"{told:<22} {'TTFT' if sequence.first_token_s is not None else 'waits'} {_duration(waited_s)}"
    if width >= 100:
        told = f"{told:<34} {sequence.num_blocks:,} blocks"
    tail = Text(f"{told:<46}" if width >= 100 else f"{told:<34}")
    if sequence.num_preemptions:
        tail.append(f" preempted {sequence.num_preemptions:,}", _WARN)
    bar_width = width - line.cell_len - (66 if width >= 100 else 48 if width >= 72 else 34)
    if bar_width >= _NARROWEST_BAR:
        line.append_text(_bar(sequence, bar_width))
    return line.append_text(tail)


def _bar(sequence: LiveSequence, width: int) -> Text:
    """From the prompt's first token to the last that the answer may have."""
    prompt = max(sequence.num_prompt_tokens, 0)
    generated = max(sequence.num_output_tokens, 0)
    total = max(prompt + sequence.max_tokens, prompt + generated, 1)
    found = min(max(sequence.num_cached_tokens, 0), prompt)
    computed = min(max(sequence.num_computed_tokens, found), prompt)
    marks: list[Mark] = []
    before = 0
    for until, mark in (
        (found, _CACHED_PROMPT),
        (computed, _PREFILLED),
        (prompt, _TO_PREFILL),
        (prompt + generated, _GENERATED),
        (total, _TO_COME),
    ):
        # Of each part that there is, something can be seen: an answer's first tokens too.
        marks += [mark] * max(-(-until * width // total) - len(marks), until > before)
        before = until
    return _run(marks[:width])


def _end(ended: LiveEnd) -> Text:
    return Text(
        f"{ended.sequence_id:>6} {safe_line(ended.finish_reason):<7} {ended.num_prompt_tokens:,} + "
        f"{ended.num_output_tokens:,} in {_duration(ended.ended_s - ended.arrival_s)}",
        _MUTED,
    )


# -- words and lines ---------------------------------------------------------------------------------------------------


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _run(marks: Iterable[Mark]) -> Text:
    """Marks as one text, with a span for each stretch of one style."""
    text = Text()
    stretch, style = "", _INK
    for character, its_style in marks:
        if its_style is not style:
            text.append(stretch, style)
            stretch, style = "", its_style
        stretch += character
    return text.append(stretch, style)


def _cut(line: Text, width: int) -> Text:
    line.no_wrap, line.overflow = True, "crop"
    if cell_len(line.plain) > width:
        line.truncate(width)
    return line
