"""A hub like Hugging Face's, on this machine: repositories with revisions, some gated or private."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_an_account_with_access"  # noqa: S105
OTHER_TOKEN = "hf_of_an_account_without_access"  # noqa: S105


@dataclass
class Repository:
    """Files by name, of each revision by name."""

    revisions: dict[str, dict[str, bytes]]
    is_gated: bool = False
    is_private: bool = False

    def commit_of(self, revision: str) -> str | None:
        for name in self.revisions:
            commit = _digest(name.encode())
            if revision in (name, commit):
                return commit
        return None

    def files_at(self, commit: str) -> dict[str, bytes]:
        return next(files for name, files in self.revisions.items() if _digest(name.encode()) == commit)


@dataclass
class StubHub:
    """What the hub has, and what it was asked for."""

    repositories: dict[str, Repository]
    url: str = ""
    requests: list[str] = field(default_factory=list)  # method and path

    @property
    def downloads(self) -> list[str]:
        """The names of the files that were downloaded."""
        return [path.rpartition("/")[2] for path in self.requests if path.startswith("GET ") and "/resolve/" in path]


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[StubHub]:
    """Serve the repositories on a free port."""
    hub = StubHub(repositories)

    class Handler(_Handler):
        stub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    stub: StubHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.stub.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0].replace("%2F", "/")
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").split("/")[1:]
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.stub.repositories.get(name)
        has_access = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        commit = None if repository is None else repository.commit_of(rest[1] if len(rest) > 1 else "main")
        if repository is None or (repository.is_private and not has_access):
            self._refuse(401, "RepoNotFound")
        elif commit is None:
            self._refuse(404, "RevisionNotFound")
        elif is_api and rest[:1] == ["tree"]:
            self._answer_json([_entry(file, content) for file, content in repository.files_at(commit).items()])
        elif is_api:
            siblings = [{"rfilename": file} for file in repository.files_at(commit)]
            self._answer_json({"id": name, "sha": commit, "siblings": siblings})
        elif repository.is_gated and not has_access:
            self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
        else:
            self._answer_file(repository.files_at(commit).get("/".join(rest[2:])), commit)

    def _answer_file(self, content: bytes | None, commit: str) -> None:
        if content is None:
            self._refuse(404, "EntryNotFound")
        else:
            self._answer(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit})

    def _answer_json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _entry(file: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:40]
