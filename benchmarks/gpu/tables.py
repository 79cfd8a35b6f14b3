"""From records to one Markdown page. Pure: what was measured goes in, text comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.records import Record, latest
from benchmarks.gpu.stages import STAGES

Cell = Callable[[Any], str]

NOT_BEGUN = "not begun"  # how a stage ended for which no time was left


def text(value: Any) -> str:
    return str(value).replace("|", "/").replace("\n", " ")


def scaled(factor: float, places: int, unit: str = "") -> Cell:
    return lambda value: f"{factor * value:,.{places}f}{unit}"


def scientific(value: float) -> str:
    return f"{value:.1e}"


WHOLE, MILLISECONDS, MICROSECONDS, PERCENT = scaled(1, 0), scaled(1e3, 2), scaled(1e6, 1), scaled(100, 0, " %")
EXACT_PERCENT, TERABYTES, TERAFLOP, GIB = scaled(100, 2, " %"), scaled(1e-12, 2), scaled(1e-12, 0), scaled(2**-30, 2)


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    key: str
    cell: Cell = text


@dataclass(frozen=True, slots=True)
class Table:
    """What one kind of record looks like. The last column says what went wrong, if anything did."""

    columns: tuple[Column, ...]
    caption: str = ""


_SHAPE, _BATCH, _WHAT = Column("shape", "shape"), Column("sequences", "batch", WHOLE), Column("", "what")
_STEP, _SHARE = Column("a step, ms", "step_s", MILLISECONDS), Column("of the floor", "share", PERCENT)
_RATE, _GOAL = Column("tokens/s", "tokens_per_s", WHOLE), Column("goal", "goal", PERCENT)
_KERNEL, _ERROR = Column("kernel", "kernel"), Column("error", "error", scientific)
_TIME, _BANDWIDTH = Column("µs", "seconds", MICROSECONDS), Column("TB/s", "bytes_per_s", TERABYTES)
_CACHED = "No bandwidth is told where all inputs that take turns are so few that a cache holds them."
_HOW, _BLOCK = Column("timed", "how"), Column("block", "block_size")

TABLES: dict[str, Table] = {
    "ceilings": Table(
        (Column("memory, TB/s", "bytes_per_s", TERABYTES), Column("bfloat16, TFLOP/s", "flops", TERAFLOP)),
    ),
    "stage": Table(()),
    "attention": Table((_BLOCK, Column("dtype", "dtype"), Column("chosen", "chosen"), Column("the log says", "why"))),
    "errors": Table(
        (_KERNEL, _BLOCK, Column("dtype", "dtype"), _WHAT, _ERROR, Column("limit", "limit", scientific)),
        "The largest error of a row, as a share of its length, to torch in float64.",
    ),
    "attention_speed": Table(
        (_KERNEL, _BLOCK, _WHAT, _TIME, _BANDWIDTH, Column("TFLOP/s", "flops", TERAFLOP), _SHARE, _HOW),
        "Query heads/key heads x dimensions: rows x queries of keys. Of decode steps the floor is the bytes of keys "
        "and values, of prompts the multiplications, at the ceilings above. " + _CACHED,
    ),
    "kernel_speed": Table(
        (_KERNEL, _WHAT, _ERROR, Column("limit", "limit", scientific), _TIME, _BANDWIDTH, _SHARE), _CACHED
    ),
    "waits": Table(
        (_WHAT, Column("launch, µs", "launch_s", MICROSECONDS), Column("done at once", "was_done")),
        "Launched in torch's sync debug mode, in which whatever waits for the device raises.",
    ),
    "launches": Table(
        (
            _SHAPE,
            _BATCH,
            Column("a launch, µs of the host", "launch_s", MICROSECONDS),
            _STEP,
            Column("device idle at most", "idle", EXACT_PERCENT),
        )
    ),
    "tokens": Table(
        (
            Column("model", "model"),
            Column("dtype", "dtype"),
            Column("attention", "attention"),
            Column("answers that are the same", "answers_same", EXACT_PERCENT),
            Column("tokens", "tokens_same", EXACT_PERCENT),
            Column("logits' error", "error", scientific),
            Column("transformers' own", "error_of_transformers", scientific),
        ),
        "Beside transformers' generate, in the same dtype on the same device. Errors are to float64, medians.",
    ),
    "steps": Table(
        (
            _SHAPE,
            _WHAT,
            _BATCH,
            Column("context", "context", WHOLE),
            _STEP,
            Column("floor, ms", "floor_s", MILLISECONDS),
            _SHARE,
            _GOAL,
            _RATE,
            Column("attention", "attention"),
        ),
        "A step is launched and finished here, in one process: without the worker's poll of 0.2 ms and its queues, "
        "which `http` shows.",
    ),
    "capacity": Table(
        (
            _SHAPE,
            Column("the log's sum", "sum"),
            Column("tokens", "num_tokens", WHOLE),
            Column("GiB", "cache_bytes", GIB),
            Column("free afterwards, GiB", "free_bytes", GIB),
            Column("to be left free, GiB", "kept_bytes", GIB),
        )
    ),
    "growth": Table(
        (
            _SHAPE,
            Column("steps", "step"),
            Column("peak, GiB", "peak_bytes", GIB),
            Column("reserved, GiB", "reserved_bytes", GIB),
            Column("free, GiB", "free_bytes", GIB),
            Column("process, GiB", "resident_bytes", GIB),
            Column("growth, GiB", "growth_bytes", GIB),
        )
    ),
    "http": Table(
        (
            _SHAPE,
            Column("clients", "clients", WHOLE),
            Column("", "side"),
            _RATE,
            Column("TTFT p50, ms", "ttft_p50_s", MILLISECONDS),
            Column("TPOT p50, ms", "tpot_p50_s", MILLISECONDS),
            Column("client's lag p99, ms", "client_lag_p99_s", MILLISECONDS),
            Column("valid", "is_valid"),
        )
    ),
    "http_share": Table((Column("", "side"), Column("of the rate without", "share", PERCENT), _GOAL)),
    "transformers": Table(
        (_SHAPE, _BATCH, Column("way", "way"), _STEP, _RATE, Column("prompts counted", "whole_tokens_per_s", WHOLE)),
        "A step is the difference between long and short answers, divided by their tokens; with continuous batching, "
        "the mean of those in which all requests run.",
    ),
    "tests": Table((Column("file", "file"), Column("pytest says", "summary"))),
    "vllm": Table(
        (
            _SHAPE,
            _WHAT,
            _BATCH,
            _STEP,
            _RATE,
            Column("prompts counted", "whole_tokens_per_s", WHOLE),
            Column("load, s", "load_s", scaled(1, 0)),
        )
    ),
}


def outcome(record: Record) -> str:
    """What is to be said of a row beside its figures."""
    if "failed" in record:
        return f"**failed**: {text(record['failed'])}"
    if "skipped" in record:
        return f"skipped: {text(record['skipped'])}"
    if record.get("goal") is not None and record.get("share") is not None:
        return "met" if record["share"] >= record["goal"] else "**missed**"
    return ""


def markdown(table: Table, records: Sequence[Record]) -> str:
    """Only with columns that some record fills."""
    columns = [column for column in table.columns if any(record.get(column.key) is not None for record in records)]
    rows = []
    for record in records:
        cells = ["" if record.get(each.key) is None else each.cell(record[each.key]) for each in columns]
        rows.append([*cells, outcome(record)])
    headings, alignments = [each.heading for each in columns], [_alignment(each.cell) for each in columns]
    if any(row[-1] for row in rows):
        headings, alignments = [*headings, ""], [*alignments, "---"]
    lines = [headings, alignments, *(row[: len(headings)] for row in rows)]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines)


def _alignment(cell: Cell) -> str:
    return "---" if cell is text else "---:"


def machines(records: Iterable[Record]) -> list[str]:
    """A line for each run: what it ran on, and how."""
    lines = []
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        memory = f", {record['memory_bytes'] / 2**30:.0f} GiB" if record["memory_bytes"] else ""
        commit = f", commit {record['commit']}" if record["commit"] else ""
        where = (
            f"{record['device']}{memory}, {record['num_cores']} cores, Python {record['python']}, {versions}{commit}"
        )
        lines.append(f"`{record['command']}`: {where}.")
    return lines


def stage_lines(records: Iterable[Record]) -> list[Record]:
    """How each stage ended, in their order. That it was not begun again says nothing of what it told before."""
    ended: dict[str, Record] = {}
    for record in records:
        if record["name"] not in ended or not record["outcome"].startswith(NOT_BEGUN):
            ended[record["name"]] = record
    return [ended[stage.name] for stage in STAGES if stage.name in ended]


STAGE_TABLE = Table(
    (Column("stage", "name"), Column("", "question"), Column("s", "seconds", WHOLE), Column("ended", "outcome"))
)


def page(records: Iterable[Record]) -> str:
    """Everything, of each stage what its last run told."""
    told = list(records)
    of_stages = latest(record for record in told if record["stage"] != "command")
    parts = machines(record for record in told if record["table"] == "machine")
    parts.append(markdown(STAGE_TABLE, stage_lines(record for record in told if record["table"] == "stages")))
    ceilings = [record for record in told if record["table"] == "ceilings"]
    if ceilings:
        parts.append(markdown(TABLES["ceilings"], ceilings))
    for stage in STAGES:
        mine = [record for record in of_stages if record["stage"] == stage.name]
        tables = [name for name in TABLES if name != "ceilings" and any(each["table"] == name for each in mine)]
        if tables:
            parts.append(f"### {stage.name}")
        for name in tables:
            caption = TABLES[name].caption
            shown = markdown(TABLES[name], [record for record in mine if record["table"] == name])
            parts += [caption, shown] if caption else [shown]
    return "\n\n".join(parts) + "\n"
