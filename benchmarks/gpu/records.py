"""Records of measurements. Each is written immediately as a line of JSON, so a run that is cut off loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # has `run`, `stage` and `table`; `failed` or `skipped` if there are no figures


class Recorder:
    """Append to the file of one run. Several processes may do so, one after the other."""

    def __init__(self, folder: Path, run: str, stage: str) -> None:
        self._file, self._run, self._stage = folder / f"records-{run}.jsonl", run, stage

    def write(self, table: str, fields: Record) -> None:
        line = json.dumps({"run": self._run, "stage": self._stage, "table": table, **fields}, default=str)
        with self._file.open("a") as file:
            file.write(line + "\n")

    def of_this_run(self, table: str) -> list[Record]:
        if not self._file.exists():
            return []
        return [record for record in parse(self._file.read_text().splitlines()) if record["table"] == table]


def parse(lines: Iterable[str]) -> Iterator[Record]:
    """Parse lines; skip a last line that was cut off in the middle."""
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and {"run", "stage", "table"} <= record.keys():
            yield record


def read_all(folder: Path) -> list[Record]:
    """Return the records of all runs in the folder, oldest first."""
    files = sorted(folder.glob("records-*.jsonl"))
    return [record for file in files for record in parse(file.read_text().splitlines())]


def latest(records: Iterable[Record]) -> list[Record]:
    """Keep each stage's records of its last run. Runs are named by their time."""
    kept = list(records)
    last: dict[str, str] = {}
    for record in kept:
        last[record["stage"]] = max(last.get(record["stage"], ""), record["run"])
    return [record for record in kept if record["run"] == last[record["stage"]]]
