"""Tests of a server whose files are all read-only, but for the directory of --cache-dir."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.quick_compiler import quick_compiler
from tests.support.server_process import ServerProcess

# Make every mount read-only in a namespace of its own, mount an empty directory at $1, and run the rest there.
READ_ONLY = """
mount --make-rprivate /
[ "$1" = - ] || mount -t tmpfs -o mode=0700 none "$1"
mount -o remount,bind,ro /
for each in /tmp /var/tmp /dev/shm /run; do mount -o remount,bind,ro $each 2>/dev/null; done
shift
! touch /tmp/can-be-written 2>/dev/null || exit 77
exec "$@"
"""


def in_read_only_root(cache: str) -> list[str]:
    """Return the command that runs another one with a read-only root, and an empty directory at `cache` unless "-"."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare")
    prefix = [unshare, "--mount", "--map-root-user", "/bin/sh", "-c", READ_ONLY, "sh", cache]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a namespace with a read-only root")
    return prefix


@pytest.mark.long
def test_it_serves_with_a_read_only_root_and_one_writable_directory(tmp_path: Path) -> None:
    """Compiled kernels, a chat's template and a grammar included."""
    cache = tmp_path / "cache"
    cache.mkdir()
    prefix = in_read_only_root(str(cache))
    quick_compiler(tmp_path)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    server = ServerProcess(
        "demo", "--cache-dir", str(cache), log=tmp_path / "log", prefix=prefix, environment=environment
    )
    try:
        server.wait_until_ready()
        answer = server.generate("a", max_tokens=8, grammar={"type": "regex", "value": "[a-z]{3}"})
        assert len(answer["generated_text"]) == 3
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
        seen = Path(f"/proc/{server.process.pid}/root") / cache.relative_to("/")  # as the server sees it
        if shutil.which("cc"):
            assert list((seen / "servekit").glob("*.so")), "the compiled kernels are kept"
        assert "WARNING" not in server.log.read_text()
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


def test_without_a_writable_directory_the_error_names_the_setting() -> None:
    command = [*in_read_only_root("-"), sys.executable, "-m", "servekit", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "set --cache-dir" in done.stderr


def test_a_cache_directory_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-m", "servekit", "serve", "--cache-dir", str(file / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Not a directory; choose a directory that can be written" in done.stderr
