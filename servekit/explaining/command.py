"""`servekit explain`: replay a journal, and print where the time of one of its sequences went."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from servekit.errors import ConfigError
from servekit.explaining.journal_watcher import JournalWatcher
from servekit.explaining.page import as_page
from servekit.explaining.report import as_text
from servekit.laboratory.page import write_page
from servekit.observability.journal import journal_paths, replay_journal
from servekit.scheduler.explanation import Explanation


class ExplainOptions(Struct, frozen=True, kw_only=True):
    """The arguments of the command."""

    file: Path
    sequence_id: int
    out: Path | None = None
    as_json: bool = False


def explain_sequence(options: ExplainOptions) -> int:
    """Run the command and return the exit code. Raises ConfigError."""
    explanation = _find(options)
    if options.as_json:
        print(msgspec.json.encode(explanation).decode())
    else:
        print(as_text(explanation))
    if options.out is not None:
        title = f"sequence {explanation.sequence_id} of {options.file.name}"
        write_page(options.out / "explain.html", as_page(title, explanation))
    return 0


def _find(options: ExplainOptions) -> Explanation:
    """Return the explanation from the journal of the replica on which the sequence was last. Raises ConfigError."""
    found: list[Explanation] = []
    known: list[str] = []
    for path in journal_paths(options.file):
        watcher = JournalWatcher(options.sequence_id)
        result = replay_journal(path, watcher)
        if result.difference is not None:
            print(f"servekit: {path}: the replay differs from here on: {result.difference}", file=sys.stderr)
        explanation = watcher.explanation()
        if explanation is not None:
            found.append(explanation)
        elif watcher.ids:
            known.append(f"{path} has the sequences {watcher.ids[0]} to {watcher.ids[1]}")
    if not found:
        raise ConfigError(
            f"sequence {options.sequence_id} was not added in {options.file}; {'; '.join(known) or 'it has none'}. "
            f"Earlier ones may be in {options.file.name}.1 and so on"
        )
    return max(found, key=lambda each: (each.is_finished, each.wall_time_s))
