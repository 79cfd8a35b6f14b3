"""Draw a frame of the live view as lines for a terminal of any size, without clock or I/O.

From top to bottom: the server and its state, its figures, the last steps as a strip, the KV blocks as a grid, and as
many sequences as there is room for. Each kind of item has its own character besides its colour, so the view can be read
without colours. All text of the server goes through `safe_line`.
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

from servekit.client.safe_text import safe_line
from servekit.observability.live_frames import (
    CACHED,
    FENCED,
    FREE,
    MAX_CELLS,
    SHARED,
    LiveEnd,
    LiveLimits,
    LiveSequence,
    LiveState,
    LiveStep,
)

_INK, _MUTED, _TITLE = Style(), Style(dim=True), Style(bold=True)
_GOOD, _WARN, _BAD = Style(color="green"), Style(color="yellow"), Style(color="red", bold=True)
_DECODE, _PREFILL, _CACHE = Style(color="bright_blue"), Style(color="yellow"), Style(color="cyan")
_STATE_STYLE = {"ready": _GOOD, "failed": _BAD}

Glyph = tuple[str, Style]
_GENERATED, _PREFILLED, _CACHED_PROMPT = ("█", _DECODE), ("▒", _PREFILL), ("▓", _CACHE)
_DRAFTED = ("◆", _GOOD)
_TO_PREFILL, _REMAINING = ("░", _MUTED), ("·", _MUTED)
_CELLS: dict[int, Glyph] = {
    FREE: ("·", _MUTED),
    CACHED: ("▒", _CACHE),
    SHARED: ("▓", Style(color="magenta")),
    FENCED: ("x", Style(color="red")),
}
_EIGHTHS = " ▁▂▃▄▅▆▇"
_GOLDEN_ANGLE = 137.508 / 360
_MIN_BAR_WIDTH = 8
QUIT_HINT = "q quits"


def draw(state: LiveState, width: int, height: int, warning: str = "") -> list[Text]:
    """Return at most `height` lines, none wider than `width` cells."""
    lines = [_title(state, width)]
    if warning:
        lines.append(Text(safe_line(warning), _BAD))
    lines += _flow(_models(state), width)
    lines += _flow(_adapters(state), width)
    lines += _flow(_figures(state), width)
    lines += _flow([Text(words, _MUTED) for words in _workers(state)], width)
    if (limits := state.limits) is not None:
        # Of 24 lines some ten are left for sequences; from 60 lines on, strip and grid have their full height.
        num_rows = min(max(height // 8, 2), 8)
        if height >= 14:
            lines += [Text(), *_strip(state.steps, limits, width, num_rows)]
            lines += [Text(), *_blocks(state, limits, width, num_rows - 1)]
        lines += [Text(), *_sequences(state, width, height - len(lines) - 1)]
    return [_cut(line, width) for line in lines[:height]]


# -- the server --------------------------------------------------------------------------------------------------------


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
    gap = width - title.cell_len - len(QUIT_HINT)
    if gap > 1:
        title.append(" " * gap + QUIT_HINT, _MUTED)
    return title


def _models(state: LiveState) -> list[Text]:
    """Name all models of a server with several, each with its state; the one that is shown is bold.

    What generates no text has its kind, too.
    """
    return [
        Text.assemble(
            (safe_line(each.name), _TITLE if each.name == state.model_name else _INK),
            (f" {safe_line(each.state)}", _STATE_STYLE.get(each.state, _MUTED)),
            ("" if each.kind == "generate" else f" {safe_line(each.kind)}", _MUTED),
        )
        for each in state.models
    ]


def _adapters(state: LiveState) -> list[Text]:
    """Name the LoRA adapters that have requests, each with their number."""
    found = state.adapters
    if found is None:
        return []
    texts = [Text.assemble(("adapters ", _MUTED), (f"{found.num_adapters:,}", _TITLE))]
    texts += [Text.assemble((safe_line(name), _INK), (f" {number:,}", _TITLE)) for name, number in found.in_use]
    if found.num_waiting:
        texts.append(Text.assemble(("waiting for a place ", _MUTED), (f"{found.num_waiting:,}", _WARN)))
    return texts


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
    ]
    if state.num_draft_steps > 0:  # each gave one token, and one more for each accepted draft
        figures += [
            ("drafts accepted", _percent(state.num_accepted_tokens, state.num_drafted_tokens)),
            ("tokens/step", f"{1 + state.num_accepted_tokens / state.num_draft_steps:.2f}"),
        ]
    figures += [
        ("tokens", f"{state.num_generated_tokens:,}"),
    ]
    return [Text.assemble((f"{name} ", _MUTED), (value, _TITLE)) for name, value in figures]


def _workers(state: LiveState) -> list[str]:
    lines = []
    for number, worker in enumerate(state.workers):
        device = f"{worker.device} on {worker.host}" if worker.host else worker.device
        words = [safe_line(word) for word in (worker.state, device, worker.dtype, worker.attention) if word]
        if len(state.workers) == 1:
            lines.append(f"worker: {' '.join(words)}")
            continue
        used = _percent(worker.num_blocks - worker.num_available_blocks, worker.num_blocks)
        load = f"running {worker.num_running:,} waiting {worker.num_waiting:,} KV {used}"
        lines.append(f"replica {number}: {' '.join([*words, load])}")
    return lines


def _flow(parts: Iterable[Text], width: int) -> list[Text]:
    """Place the parts side by side, in as many lines as they need."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 3 + part.cell_len <= width:
            lines[-1].append("   ").append_text(part)
        else:
            lines.append(part.copy())
    return lines


# -- steps -------------------------------------------------------------------------------------------------------------


def _strip(steps: list[LiveStep], limits: LiveLimits, width: int, num_rows: int) -> list[Text]:
    """Draw the last steps, the newest at the right; a column's height is the step's share of the token budget."""
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


def _column(step: LiveStep, budget: int, num_rows: int) -> list[Glyph]:
    """Return a column from the bottom up: rows of decode, then rows of prefill. A kind that is present is visible."""
    max_height = num_rows * 8  # in eighths of a character
    decode, prefill = (
        min(max(num_tokens * max_height // max(budget, 1), num_tokens > 0), max_height)
        for num_tokens in (step.num_decode_tokens, step.num_prefill_tokens)
    )
    if decode and prefill:
        num_decode_rows = min(max(round(decode / 8), 1), num_rows - 1)
        total = min(max(decode + prefill, num_decode_rows * 8 + 1), max_height)
    else:
        num_decode_rows = num_rows if decode else 0
        total = decode + prefill
    column: list[Glyph] = []
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
        cells = [_dominant(cells[begin:end]) for begin, end in pairwise(edges)]
    rows = [_run(map(_cell, cells[begin : begin + width])) for begin in range(0, len(cells), max(width, 1))]
    return [heading, *rows]


def _cells(runs: list[tuple[int, int]]) -> list[int]:
    cells: list[int] = []
    for kind, count in runs:
        cells += [kind] * min(max(count, 0), MAX_CELLS - len(cells))
    return cells


def _dominant(cells: list[int]) -> int:
    """Return the kind to draw where several cells share a place: the most frequent kind in use."""
    in_use = [kind for kind in cells if kind != FREE]
    return max(set(in_use), key=in_use.count) if in_use else FREE


def _cell(kind: int) -> Glyph:
    return _CELLS.get(kind) or ("█", _owner_style(kind))


@lru_cache(maxsize=4096)
def _owner_style(sequence_id: int) -> Style:
    """Return the colour of a sequence: consecutive ids differ much in hue. The console uses the same hues."""
    red, green, blue = colorsys.hls_to_rgb(sequence_id * _GOLDEN_ANGLE % 1, 0.55, 0.65)
    return Style(color=Color.from_rgb(red * 255, green * 255, blue * 255))


# -- sequences ---------------------------------------------------------------------------------------------------------


def _sequences(state: LiveState, width: int, num_rows: int) -> list[Text]:
    kinds = [(_CACHED_PROMPT, "cached"), (_PREFILLED, "prefilled"), (_TO_PREFILL, "to prefill")]
    kinds.append((_GENERATED, "generated"))
    if state.num_draft_steps > 0:
        kinds.append((_DRAFTED, "by drafts"))
    kinds.append((_REMAINING, "remaining"))
    heading = Text("sequences", _TITLE)
    for glyph, name in kinds:
        heading.append(" ", _MUTED).append(*glyph).append(f" {name}", _MUTED)
    num_rows -= 1
    shown = state.sequences[: max(num_rows, 0)]
    num_alive = max(state.num_running + state.num_waiting, len(state.sequences))
    if num_alive > len(shown) == num_rows > 0:
        shown = shown[:-1]  # the last line counts the sequences that are not shown
    rows = [_sequence(sequence, state.now_s, width) for sequence in shown]
    if num_alive > len(shown):
        rows.append(Text(f"and {num_alive - len(shown):,} more", _MUTED))
    if not rows:
        rows.append(Text("no sequences", _MUTED))
    rows += [_end(ended) for ended in reversed(state.ended)][: max(num_rows - len(rows), 0)]
    return [heading, *rows]


def _sequence(sequence: LiveSequence, now_s: float, width: int) -> Text:
    line = Text.assemble(
        (f"{sequence.sequence_id:>6} ", _owner_style(sequence.sequence_id)),
        (f"{safe_line(sequence.state):<7} ", _MUTED if sequence.state == "waiting" else _INK),
    )
    figures = f" {sequence.num_prompt_tokens:,} + {sequence.num_output_tokens:,} / {sequence.max_tokens:,}"
    waited_s = (sequence.first_token_s or now_s) - sequence.arrival_s
    figures = f"{figures:<22} {'TTFT' if sequence.first_token_s is not None else 'waits'} {_duration(waited_s)}"
    if width >= 100:
        figures = f"{figures:<34} {sequence.num_blocks:,} blocks"
    tail = Text(f"{figures:<46}" if width >= 100 else f"{figures:<34}")
    if sequence.num_preemptions:
        tail.append(f" preempted {sequence.num_preemptions:,}", _WARN)
    bar_width = width - line.cell_len - (66 if width >= 100 else 48 if width >= 72 else 34)
    if bar_width >= _MIN_BAR_WIDTH:
        line.append_text(_bar(sequence, bar_width))
    return line.append_text(tail)


def _bar(sequence: LiveSequence, width: int) -> Text:
    """Draw the sequence from the first token of its prompt to the last token that its answer may have."""
    prompt = max(sequence.num_prompt_tokens, 0)
    generated = max(sequence.num_output_tokens, 0)
    accepted = min(max(sequence.num_accepted_tokens, 0), generated)
    total = max(prompt + sequence.max_tokens, prompt + generated, 1)
    cached = min(max(sequence.num_cached_tokens, 0), prompt)
    computed = min(max(sequence.num_computed_tokens, cached), prompt)
    glyphs: list[Glyph] = []
    previous_end = 0
    for end, glyph in (
        (cached, _CACHED_PROMPT),
        (computed, _PREFILLED),
        (prompt, _TO_PREFILL),
        (prompt + generated - accepted, _GENERATED),
        (prompt + generated, _DRAFTED),
        (total, _REMAINING),
    ):
        # A part that is present is visible: at least one cell, for an answer's first tokens too.
        glyphs += [glyph] * max(-(-end * width // total) - len(glyphs), end > previous_end)
        previous_end = end
    return _run(glyphs[:width])


def _end(ended: LiveEnd) -> Text:
    return Text(
        f"{ended.sequence_id:>6} {safe_line(ended.finish_reason):<7} {ended.num_prompt_tokens:,} + "
        f"{ended.num_output_tokens:,} in {_duration(ended.ended_s - ended.arrival_s)}",
        _MUTED,
    )


# -- text and lines  ---------------------------------------------------------------------------------------------------


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _run(glyphs: Iterable[Glyph]) -> Text:
    """Join glyphs into one text, with one span for adjacent glyphs of the same style."""
    text = Text()
    stretch, style = "", _INK
    for character, its_style in glyphs:
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
