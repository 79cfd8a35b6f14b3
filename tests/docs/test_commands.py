"""Claims about the command lines in the documentation: the programs accept them, and make has the targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.cli.arguments import make_parser
from servekit.cli import _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
MODULES = ("benchmarks", "loadtest", "tests", "scripts", "servekit")


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in the page's sh and console blocks, without prompts and comments."""
    for language, block in re.findall(r"^```(sh|console)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                continue  # what a command prints
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:
                continue  # a quotation over several lines: shell code, and none of our programs
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                yield words


COMMANDS = [(page.relative_to(ROOT).as_posix(), words) for page in PAGES for words in command_lines(page)]


def arguments_of(program: str) -> list[tuple[str, list[str]]]:
    """Return (page, arguments) of each line that begins with this program, up to a shell operator."""
    found = []
    for page, words in COMMANDS:
        name, *arguments = words
        if [Path(name).name, *arguments][: len(program.split())] != program.split():
            continue
        rest = arguments[len(program.split()) - 1 :]
        ends = [index for index, word in enumerate(rest) if word in ("|", "&", ">", "2>&1", "&&", ";")]
        found.append((page, rest[: min(ends, default=len(rest))]))
    return found


@pytest.mark.parametrize(("page", "arguments"), arguments_of("servekit"))
def test_servekit_accepts_the_command(page: str, arguments: list[str]) -> None:
    _parser().parse_args(arguments)


@pytest.mark.parametrize(("page", "arguments"), arguments_of("python -m loadtest"))
def test_loadtest_accepts_the_command(page: str, arguments: list[str]) -> None:
    make_parser("").parse_args(arguments)


def test_make_has_every_target_that_a_page_names() -> None:
    named = {word for page in PAGES for word in re.findall(r"`make ([a-z][\w-]*)", page.read_text())}
    named |= {arguments[0] for _, arguments in arguments_of("make") if arguments}
    assert named <= TARGETS
    assert {"serve", "test", "docs"} <= named


def test_every_module_that_a_page_runs_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"python -m ([a-z][\w.]*)", page.read_text())}
    ours = {name for name in named if name.partition(".")[0] in MODULES}
    paths = [ROOT / name.replace(".", "/") for name in ours]
    assert not [path for path in paths if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())]
    assert {"loadtest", "benchmarks.worker_memory", "benchmarks.control_plane"} & ours


def test_the_pages_have_commands_of_every_program() -> None:
    assert len(arguments_of("servekit")) >= 8 and len(arguments_of("python -m loadtest")) >= 2
