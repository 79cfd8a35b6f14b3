"""Start a server with keys for two tenants, one that attacks and one that is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.server_process import ONE_THREAD, ServerProcess, serving
from tests.torture.report import BUILD

ATTACKER_KEY = "key-of-the-attacker"
BYSTANDER_KEY = "key-of-the-bystander"
_OBSERVER_KEY = "key-of-the-observer"

# Pools that are soon touched completely, because the first use of memory looks like growth. The large one holds 128
# long answers.
SMALL_POOL = ("--num-kv-blocks", "1024")
LARGE_POOL = ("--num-kv-blocks", "8192")

MAX_MORE_MIB = 1024  # memory that one tenant may take, in all processes together
GIVES_UP_AT_MIB = 4 * MAX_MORE_MIB  # the attack has succeeded, and this machine has to survive it
MEMORY_INTERVAL_S = 0.25  # between two looks


@contextmanager
def serving_tenants(
    name: str,
    *flags: str,
    limits: str = "",
    environment: dict[str, str] | None = None,
    prefix: list[str] | None = None,
) -> Iterator[ServerProcess]:
    """Yield a server that is ready. `limits` are lines of TOML for the attacker's key; `prefix` executes the server."""
    BUILD.mkdir(parents=True, exist_ok=True)
    keys = BUILD / f"attack-{name}.toml"
    keys.write_text(
        f'[[key]]\nkey = "{ATTACKER_KEY}"\ntenant = "attacker"\n{limits}\n'
        f'[[key]]\nkey = "{BYSTANDER_KEY}"\ntenant = "bystander"\n'
        f'[[key]]\nkey = "{_OBSERVER_KEY}"\ntenant = "observer"\nonly = "metrics"\n'
    )
    pool = () if "--num-kv-blocks" in flags else SMALL_POOL
    arguments = (*pool, *flags, "--api-keys-file", str(keys))
    log = BUILD / f"attack-{name}.log"
    with serving(*arguments, log=log, environment=ONE_THREAD | (environment or {}), prefix=prefix) as server:
        server.client.headers["X-API-Key"] = _OBSERVER_KEY  # for ServerProcess.metric
        yield server


def memory_mib(server: ServerProcess) -> dict[str, float]:
    """Return the resident memory of the server, of its worker, and of all other processes below them."""
    worker = server.worker_pids()
    found = {"server": _resident_mib(server.process.pid), "worker": sum(map(_resident_mib, worker))}
    found["others"] = sum(_resident_mib(pid) for pid in descendants(server.process.pid)) - found["worker"]
    return found


def descendants(pid: int) -> list[int]:
    """Return the process ids of all processes below one."""
    children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in _read(file).split()]
    return children + [below for child in children for below in descendants(child)]


def _resident_mib(pid: int) -> float:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # the process has ended
