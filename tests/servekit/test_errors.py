"""Claims about errors: there is one tree, and the drawing of it in servekit/errors.py is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from servekit import errors

SOURCES = Path(errors.__file__).parent


def drawn() -> dict[str, tuple[str, int | None]]:
    """Parent and HTTP status of each class in the docstring's drawing."""
    shown: dict[str, tuple[str, int | None]] = {}
    parents = ["ServekitError"]
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ((?:│  )*)[├└]─ (\w+) +(\d{3})?", line):
            depth = len(found[1]) // 3 + 1
            parents[depth:] = [found[2]]
            shown[found[2]] = parents[depth - 1], int(found[3]) if found[3] else None
    return shown


def defined() -> dict[str, tuple[str, int | None]]:
    """Parent and HTTP status of each class in servekit/ that derives from ServekitError, but for private ones."""
    parents, statuses = {"ServekitError": ""}, {"ServekitError": 500}
    classes = [node for path in SOURCES.rglob("*.py") for node in classes_in(path) if not node.name.startswith("_")]
    found: dict[str, tuple[str, int | None]] = {}
    while children := [node for node in classes if parent_of(node) in parents and node.name not in parents]:
        for node in children:
            parents[node.name] = parent_of(node)
            statuses[node.name] = own_status(node) or statuses[parent_of(node)]
            found[node.name] = parents[node.name], statuses[node.name]
    return found


def classes_in(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def parent_of(node: ast.ClassDef) -> str:
    return node.bases[0].id if node.bases and isinstance(node.bases[0], ast.Name) else ""


def own_status(node: ast.ClassDef) -> int | None:
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name("status")], value=ast.Constant(int(status))):
                return status
    return None


def test_the_drawing_shows_every_error_of_the_tree_with_its_status() -> None:
    shown, real = drawn(), defined()
    assert shown.keys() == real.keys()
    for name, (parent, status) in shown.items():
        assert parent == real[name][0], name
        assert status in (None, real[name][1]), name
        is_answered = parent in ("RequestError", "WorkerError") or name in (
            "SandboxUnavailable",
            "StorageFailed",
            "InternalError",
        )
        assert (status is not None) == is_answered, name


def test_errors_that_several_modules_give_name_the_limit_and_when_to_try_again() -> None:
    refused = errors.prompt_too_long(2048, 5000, "prompts[3]")
    assert (refused.status, refused.param) == (400, "prompts[3]")
    assert "2048" in refused.message and "5000" in refused.message
    assert errors.shutting_down().retry_after_s == 5
