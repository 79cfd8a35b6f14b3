"""Install the clients of docs/clients/, run what their pages offer to paste, and write the table in docs/clients.md.

`python -m tests.clients.integrations` does this for every page; names (`litellm lm-eval`) choose some. A page is all
that is needed. Its `sh` blocks install the client, in a folder of its own in build/integrations/. Its `python` and `js`
blocks and the commands of its `console` blocks must print what the page says; a block that begins with `# NAME.yaml` is
a file for them. The command fails if one does not. `--write` needs a run of all pages, and then writes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from scripts.tables import with_table
from tests.support.pasted import ADDRESS, blocks, console_commands, matches, told_by
from tests.support.server_process import free_port, serving

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
PAGES = sorted((ROOT / "docs" / "clients").glob("*.md"))
FOLDERS = ROOT / "build" / "integrations"
MODEL = "servekit/assets/demo_model"  # the demo model's directory, as pages name it
OTHER_SERVER = "http://127.0.0.1:3000"  # the address of a client that is a server itself
MAKER = "python -m tests.clients.integrations --write"
INSTALL_TIMEOUT_S, TIMEOUT_S = 3600, 600


class Failure(Exception):
    """What is pasted does not print what the page says."""


class Client(NamedTuple):
    """A client, as its page describes it."""

    page: Path

    @property
    def name(self) -> str:
        return self.page.read_text().splitlines()[0].removeprefix("# ")

    @property
    def packages(self) -> list[str]:
        """The packages with their versions: `litellm==1.110.2`, `ai@7.0.173`."""
        words = " ".join(blocks(self.page, "sh")).replace('"', " ").split()
        return [word for word in words if re.search(r"(==|.@)\d", word)]

    @property
    def shown(self) -> list[str]:
        """What the page shows: the titles of its sections that have something to run."""
        sections = re.split(r"^## ", self.page.read_text(), flags=re.MULTILINE)[1:]
        return [section.splitlines()[0] for section in sections if re.search(r"^```(python|js|console)", section, re.M)]


class Folder:
    """Where a client is installed, in a virtual environment and in node_modules, and where it runs."""

    def __init__(self, client: Client, url: str) -> None:
        self.client = client
        self.path = FOLDERS / client.page.stem
        self.run_path = self.path / "run"
        self.run_path.mkdir(parents=True, exist_ok=True)
        other = f"http://127.0.0.1:{free_port()}"
        port = {f"--port {OTHER_SERVER.rpartition(':')[2]}": f"--port {other.rpartition(':')[2]}"}
        self._replaced = {ADDRESS: url, OTHER_SERVER: other, MODEL: str(ROOT / MODEL), **port}
        folders = [self.path / "venv" / "bin", self.path / "node_modules" / ".bin"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "VIRTUAL_ENV"))}
        self.environment = {
            **kept,
            "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
            "HOME": str(self.run_path),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._groups: list[int] = []  # of processes, to end what a command leaves in the background

    def install(self) -> None:
        """Run the page's sh blocks, unless that has been done."""
        commands = "\n".join(blocks(self.client.page, "sh"))
        stamp = self.path / "installed"
        if stamp.exists() and stamp.read_text() == commands:
            return
        if "pip " in commands and not (self.path / "venv").exists():
            venv.create(self.path / "venv", with_pip=True)
        if "npm " in commands:
            (self.path / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
        # With the user's home, where pip and npm have their settings and what they have downloaded before.
        self._run(["bash", "-ec", commands], self.path, INSTALL_TIMEOUT_S, HOME=os.environ["HOME"])
        stamp.write_text(commands)

    def check(self) -> None:
        """Run the page's other blocks. Raises Failure."""
        page = self.client.page
        for text in blocks(page, "yaml"):
            name = text.splitlines()[0].removeprefix("# ")
            (self.run_path / name).write_text(self._here(text))
        for program in blocks(page, "python"):
            self._compare(self._run(["python", "-c", self._here(program)]), program)
        for program in blocks(page, "js"):
            (self.path / "program.mjs").write_text(self._here(program))
            self._compare(self._run(["node", str(self.path / "program.mjs")]), program)
        try:
            for block in blocks(page, "console"):
                for command, told in console_commands(block):
                    printed = self._run(["bash", "-c", self._here(command)])
                    if not matches(told, printed):
                        raise Failure(f"{command}\nmust print\n{told}\nand printed\n{printed[-2000:]}")
        finally:
            for group in self._groups:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    def _here(self, text: str) -> str:
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    def _compare(self, printed: str, program: str) -> None:
        told = told_by(program)
        if not told or not matches("\n".join(told), printed):
            raise Failure(f"{program}\nmust print\n" + "\n".join(told) + f"\nand printed\n{printed[-2000:]}")

    def _run(
        self, command: list[str], directory: Path | None = None, timeout_s: float = TIMEOUT_S, **environment: str
    ) -> str:
        """Return what a command prints; its errors go to a file, which processes in the background may keep open."""
        errors = self.path / "stderr.txt"
        with errors.open("w") as error_file:
            process = subprocess.Popen(
                command,
                cwd=directory or self.run_path,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=error_file,
                text=True,
                start_new_session=True,
            )
            self._groups.append(process.pid)
            try:
                printed, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise Failure(f"{' '.join(command)[:500]}\ndid not end in {timeout_s} s") from None
        if process.returncode != 0:
            raise Failure(f"{' '.join(command)[:500]}\nfailed:\n{printed[-2000:]}{errors.read_text()[-3000:]}")
        return printed


def table() -> Iterator[str]:
    """Yield one row for each client."""
    yield "| client | versions | what its page shows | outcome |"
    yield "|---|---|---|---|"
    for client in map(Client, PAGES):
        packages = ", ".join(f"`{package}`" for package in client.packages)
        yield f"| [{client.name}](clients/{client.page.name}) | {packages} | {'; '.join(client.shown)} | works |"


def page_with_table(text: str) -> str:
    """Return docs/clients.md with a new table."""
    return with_table(text, "integrations", table(), MAKER)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.integrations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(page.stem for page in PAGES)}")
    parser.add_argument("--write", action="store_true", help="write the table of docs/clients.md")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {page.stem for page in PAGES}
    if unknown or (arguments.write and arguments.names):
        parser.error(f"there is no page of {', '.join(unknown)}" if unknown else "--write needs all pages")
    failed = []
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(log=Path(directory) / "log") as server,
    ):
        for client in map(Client, PAGES):
            if arguments.names and client.page.stem not in arguments.names:
                continue
            started_s = time.monotonic()
            folder = Folder(client, server.url)
            try:
                folder.install()
                folder.check()
            except Failure as failure:
                failed.append(client.name)
                sys.stdout.write(f"{client.name}: {failure}\n")
            else:
                sys.stdout.write(f"{client.name}: works ({time.monotonic() - started_s:.0f} s)\n")
            sys.stdout.flush()
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")
    if arguments.write:
        PAGE.write_text(page_with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
