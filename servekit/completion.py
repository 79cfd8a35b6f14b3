"""Make a script that completes servekit's command line in a shell: commands, flags, values and file names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from servekit.config import settings

# By the metavar that `--help` shows. Settings of files have others, which are the last words of their names.
FILES = {"FILE", "OUT", "MODEL", "TEMPLATE", "JOURNAL", "CERT"}
DIRECTORIES = {"DIR", "PROFILE"}


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for bash, zsh or fish. Changes the parser, which must not parse anything afterwards."""
    choices = {setting.name: setting.choices for setting in settings()}
    for each in _with_subcommands(parser):
        for action in each._actions:
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
            elif action.metavar in DIRECTORIES:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.option_strings and choices.get(action.dest):
                action.choices = choices[action.dest]
    return shtab.complete(parser, shell)


def _with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action._choices_actions:
                action.choices[command.dest].description = command.help  # shells have room for the short one
            yield from action.choices.values()
