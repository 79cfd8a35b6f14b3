"""`compare`: two runs, or two sets of repetitions."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from loadtest.analysis.comparison import Side, compare
from loadtest.cli.exit_codes import SUCCESS
from loadtest.experiment import load
from loadtest.reporting.markdown import comparison_table, table


def compare_runs(arguments: argparse.Namespace) -> int:
    before, after = _side(arguments.a), _side(arguments.b)
    labels = [side.name for side in (before, after) for _ in side.runs]
    print(table([*before.summaries, *after.summaries], labels))
    print(comparison_table(compare(before, after, np.random.default_rng(arguments.seed))))
    return SUCCESS


def _side(folders: str) -> Side:
    paths = [Path(folder) for folder in folders.split(",")]
    runs = [load(path) for path in paths]
    return Side(paths[0].name, [measured for measured, _ in runs], [summary for _, summary in runs])
