"""Claims about the documentation: what it says to paste can be pasted, and answers what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tables import TABLES, with_table
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def requests() -> list[tuple[str, str, str]]:
    """(page, command, the answer that the page gives) of every curl."""
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, answer = entry.partition("\n")
                if command.startswith("curl"):
                    found.append((page.name, command, answer.strip()))
    return found


def programs() -> list[tuple[str, str]]:
    return [(page.name, block) for page in PAGES for block in blocks(page, "python")]


def matches(told: str, answer: str) -> bool:
    """Whether the answer is what the page tells; … stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, told.split("…"))), answer.strip(), re.DOTALL) is not None


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
    told = re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
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
