"""Read what a page of the documentation offers to paste, and what it says that this answers."""

from __future__ import annotations

import re
from pathlib import Path

ADDRESS = "http://127.0.0.1:8000"  # on the pages; tests put their server's in its place


def blocks(page: Path, language: str) -> list[str]:
    """Return the contents of the page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def console_commands(block: str) -> list[tuple[str, str]]:
    """Return (command, the answer that the page gives) of each `$ command` in a console block."""
    found = []
    for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = entry.splitlines()
        end = next(index for index, line in enumerate(lines) if not line.endswith("\\")) + 1
        found.append(("\n".join(lines[:end]), "\n".join(lines[end:]).strip()))
    return found


def told_by(program: str) -> list[str]:
    """Return the lines that a program prints by its own comments: `print(1 + 1)  # 2`, or `//` in JavaScript."""
    return re.findall(r"^\s*(?:print\(.*\)  #|console\.log\(.*\);  //) (.*)$", program, re.MULTILINE)


def matches(told: str, answer: str) -> bool:
    """Whether the answer is what the page tells; … stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, told.split("…"))), answer.strip(), re.DOTALL) is not None
