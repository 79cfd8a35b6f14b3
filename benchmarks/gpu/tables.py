"""Turn records into one Markdown page. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.records import Record, latest
from benchmarks.gpu.stages import STAGES

Cell = Callable[[Any], str]

NOT_STARTED = "not begun"  # the outcome of a stage for which too little time was left


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
    """The columns of one kind of record. A last column, which is not listed, says what went wrong, if anything."""

    columns: tuple[Column, ...]
    caption: str = ""


_SHAPE, _BATCH, _WHAT = Column("shape", "shape"), Column("sequences", "batch", WHOLE), Column("", "what")
_STEP, _SHARE = Column("a step, ms", "step_s", MILLISECONDS), Column("of the floor", "share", PERCENT)
_RATE, _GOAL = Column("tokens/s", "tokens_per_s", WHOLE), Column("goal", "goal", PERCENT)
_KERNEL, _ERROR = Column("kernel", "kernel"), Column("error", "error", scientific)
_TIME, _BANDWIDTH = Column("µs", "seconds", MICROSECONDS), Column("TB/s", "bytes_per_s", TERABYTES)
_CACHED = "There is no bandwidth where a cache holds all inputs that calls rotate through."
_HOW, _BLOCK = Column("timed", "how"), Column("block", "block_size")

TABLES: dict[str, Table] = {
    "ceilings": Table(
        (Column("memory, TB/s", "bytes_per_s", TERABYTES), Column("bfloat16, TFLOP/s", "flops", TERAFLOP)),
    ),
    "stage": Table(()),
    "attention": Table((_BLOCK, Column("dtype", "dtype"), Column("chosen", "chosen"), Column("the log says", "why"))),
    "errors": Table(
        (_KERNEL, _BLOCK, Column("dtype", "dtype"), _WHAT, _ERROR, Column("limit", "limit", scientific)),
        "The largest error of a row, as a share of its norm, compared with torch in float64.",
    ),
    "attention_speed": Table(
        (_KERNEL, _BLOCK, _WHAT, _TIME, _BANDWIDTH, Column("TFLOP/s", "flops", TERAFLOP), _SHARE, _HOW),
        "Query heads/key heads x dimensions: sequences x queries of keys. The floor of decode steps is the bytes of "
        "keys and values, that of prompts the multiplications, at the ceilings above. " + _CACHED,
    ),
    "kernel_speed": Table(
        (_KERNEL, _WHAT, _ERROR, Column("limit", "limit", scientific), _TIME, _BANDWIDTH, _SHARE), _CACHED
    ),
    "waits": Table(
        (_WHAT, Column("launch, µs", "launch_s", MICROSECONDS), Column("done at once", "was_done")),
        "Launched in torch's sync debug mode, in which every operation that waits for the device raises.",
    ),
    "launches": Table(
        (
            _SHAPE,
            _BATCH,
            Column("launch on the host, µs", "launch_s", MICROSECONDS),
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
        "Compared with transformers' generate in the same dtype on the same device. Errors are medians, to float64.",
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
        "Steps are launched and finished in one process, without the worker's polling (0.2 ms) and queues. `http` "
        "includes them.",
    ),
    "capacity": Table(
        (
            _SHAPE,
            Column("the log's line", "sum"),
            Column("tokens", "num_tokens", WHOLE),
            Column("GiB", "cache_bytes", GIB),
            Column("free afterwards, GiB", "free_bytes", GIB),
            Column("kept free, GiB", "kept_bytes", GIB),
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
    "http_share": Table((Column("", "side"), Column("of the rate without HTTP", "share", PERCENT), _GOAL)),
    "transformers": Table(
        (_SHAPE, _BATCH, Column("mode", "way"), _STEP, _RATE, Column("prompts counted", "whole_tokens_per_s", WHOLE)),
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
    """Return the text of a row's last column."""
    if "failed" in record:
        return f"**failed**: {text(record['failed'])}"
    if "skipped" in record:
        return f"skipped: {text(record['skipped'])}"
    if record.get("goal") is not None and record.get("share") is not None:
        return "met" if record["share"] >= record["goal"] else "**missed**"
    return ""


def markdown(table: Table, records: Sequence[Record]) -> str:
    """Format records as a Markdown table, without empty columns."""
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
    """Return a line for each run: its command and its machine."""
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
    """Return how each stage ended, in the order of stages. A later run that did not start it does not count."""
    ended: dict[str, Record] = {}
    for record in records:
        if record["name"] not in ended or not record["outcome"].startswith(NOT_STARTED):
            ended[record["name"]] = record
    return [ended[stage.name] for stage in STAGES if stage.name in ended]


STAGE_TABLE = Table(
    (Column("stage", "name"), Column("", "question"), Column("s", "seconds", WHOLE), Column("ended", "outcome"))
)


def page(records: Iterable[Record]) -> str:
    """Return the whole page, with each stage's results of its last run."""
    everything = list(records)
    of_stages = latest(record for record in everything if record["stage"] != "command")
    parts = machines(record for record in everything if record["table"] == "machine")
    parts.append(markdown(STAGE_TABLE, stage_lines(record for record in everything if record["table"] == "stages")))
    ceilings = [record for record in everything if record["table"] == "ceilings"]
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
