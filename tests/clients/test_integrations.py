"""The pages of docs/clients/: each installs one client in given versions, and has something to run."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.clients.integrations import PAGE, PAGES, ROOT, Client, page_with_table
from tests.support.pasted import ADDRESS, blocks, console_commands, matches, told_by


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_installs_given_versions_and_says_what_its_blocks_print(page: Path) -> None:
    client = Client(page)
    assert page.read_text().startswith(f"# {client.name}\n\n")
    installed = [
        word for line in "".join(blocks(page, "sh")).replace('"', "").splitlines() for word in line.split()[2:]
    ]
    assert installed == client.packages, "every package has its version"
    assert client.shown and ADDRESS in page.read_text()
    for program in (*blocks(page, "python"), *blocks(page, "js")):
        assert told_by(program) and ")  # " not in [line.strip()[:5] for line in program.splitlines()], "on one line"
    answers = [told for block in blocks(page, "console") for _, told in console_commands(block)]
    assert not blocks(page, "console") or any(answers)


def test_the_table_has_every_page_with_its_versions() -> None:
    text = PAGE.read_text()
    assert page_with_table(text) == text, "run `python -m tests.clients.integrations --write`"
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in PAGES if f"clients/{page.name}" not in navigation]


def test_the_client_that_the_tests_run_has_the_version_of_its_page() -> None:
    (package,) = Client(ROOT / "docs" / "clients" / "langchain.md").packages
    assert package == f"langchain-openai=={version('langchain-openai')}"


def test_what_a_page_says_is_read_as_people_paste_it() -> None:
    block = "$ first --flag \\\n    --other\nits answer\n$ second\n$ third\n1\n2\n"
    told = [("first --flag \\\n    --other", "its answer"), ("second", ""), ("third", "1\n2")]
    assert console_commands(block) == told
    assert told_by('print(f(1))  # one\nprint("no comment")\nconsole.log(g(2));  // two\n') == ["one", "two"]
    assert matches("{…1…}", '{"a":1,"b":2}\n') and not matches("{…3…}", '{"a":1,"b":2}')
