"""Claims about the documentation: what it says to paste can be pasted, and answers what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tables import TABLES, with_table
from tests.support.pasted import ADDRESS, blocks, console_commands, matches, told_by
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages of clients that are no dependency of the tests. `python -m tests.clients.integrations` runs what is on them.
ELSEWHERE = {page for page in (ROOT / "docs" / "clients").glob("*.md") if page.stem != "langchain"}


def requests() -> list[tuple[str, str, str]]:
    """(page, command, the answer that the page gives) of every curl."""
    return [
        (page.name, command, told)
        for page in PAGES
        if page not in ELSEWHERE
        for block in blocks(page, "console")
        for command, told in console_commands(block)
        if command.startswith("curl")
    ]


def programs() -> list[tuple[str, str]]:
    return [(page.name, block) for page in PAGES if page not in ELSEWHERE for block in blocks(page, "python")]


@pytest.mark.parametrize(("page", "command", "told"), requests())
def test_a_request_that_is_pasted_gets_the_answer_on_the_page(
    server: ServerProcess, page: str, command: str, told: str
) -> None:
    pasted = command.replace(ADDRESS, server.url).replace("curl ", "curl -sS ", 1)
    done = subprocess.run(["/bin/bash", "-c", pasted], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert matches(told, done.stdout), f"{page} tells\n{told}\nand the server\n{done.stdout}"


@pytest.mark.parametrize(("page", "program"), programs())
def test_a_program_that_is_pasted_prints_what_its_comments_say(server: ServerProcess, page: str, program: str) -> None:
    told = told_by(program)
    assert told, "an example that shows nothing"
    command = [sys.executable, "-c", program.replace(ADDRESS, server.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == told, page


def test_every_api_has_an_example_to_paste() -> None:
    pages = [page for page, _, _ in requests()]
    for page in (
        "README.md",
        "tutorial.md",
        "native.md",
        "tgi.md",
        "openai.md",
        "ollama.md",
        "anthropic.md",
        "responses.md",
        "structured_output.md",
        "tools.md",
    ):
        assert page in pages
    assert {page for page, _ in programs()} == {
        *(
            "responses.md",
            "README.md",
            "anthropic.md",
            "batches.md",
            "langchain.md",
            "python.md",
            "tgi.md",
            "openai.md",
            "ollama.md",
            "simulated_model.md",
            "tools.md",
        )
    }


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_are_what_the_code_says(page: str) -> None:
    name, lines = TABLES[page]
    text = (ROOT / "docs" / page).read_text()
    assert text == with_table(text, name, lines()), "python scripts/tables.py writes them anew"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = "servekit|workers|loadtest|tests|benchmarks|scripts|docs|deploy"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]
