"""Probe this machine: files of /proc and /sys, limits, folders, the port, Hugging Face, and the worker's Python.

A probe never raises for what it finds: what cannot be read is left out, or is a `problem`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import msgspec
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from servekit.config import ServeConfig
from servekit.doctor.machine import Clock, Cores, Folder, Hub, Limits, Machine, Memory, Port, Processor
from servekit.engine.hub import DOWNLOADED, IGNORED, ModelNotDownloaded, split_revision
from servekit.engine.model_files import DEMO_MODEL_PATH, check_weights, find_model
from servekit.errors import ConfigError
from servekit.executor.worker_process import worker_environment
from servekit.protocol.worker_facts import ModelFacts, WorkerFacts
from servekit.server.http_protocol import RESERVED_FILES
from servekit.server.listener import bind
from servekit.simulation.model import is_simulated

WORKER_TIMEOUT_S = 300.0  # it may compile the C kernels, on a machine that is busy
HUB_TIMEOUT_S = 5.0
CLOCK_READS = 10_000
EXTRAS = ("terminal", "otel")
GROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def look_at_machine(config: ServeConfig) -> Machine:
    """Return all that is known of this machine, for a server with these settings. Takes some seconds."""
    load = os.getloadavg()[0]  # before the worker's Python computes
    hub = _hub()
    path, model = _find(config, hub)
    worker, worker_problem = _ask_worker(path)
    return Machine(
        python_version=sys.version_info[:3],
        pointer_bits=64 if sys.maxsize > 2**32 else 32,
        processor=_processor(),
        cores=Cores(
            total=os.cpu_count() or 1,
            usable=len(os.sched_getaffinity(0)),
            quota=cpu_quota(GROUPS, _groups()),
            load=load,
        ),
        memory=_memory(),
        clock=_clock(),
        temporary=_temporary_folder(),
        cache=look_at_folder(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "servekit"),
        models=look_at_folder(Path(constants.HF_HUB_CACHE)),
        shared_memory=look_at_folder(Path("/dev/shm")),  # noqa: S108  # looked at, and nothing is kept there
        limits=_limits(),
        port=_port(config),
        hub=hub,
        missing_packages={extra: missing_packages(extra) for extra in EXTRAS},
        driver=_driver(),
        worker=worker,
        worker_problem=worker_problem,
        model=model or (None if worker is None else worker.model),
    )


def _find(config: ServeConfig, hub: Hub) -> tuple[Path | None, ModelFacts | None]:
    """Return the directory of the model; otherwise what is known of it without its files. Nothing is downloaded."""
    if is_simulated(config.model):
        return None, None
    try:
        path = find_model(config.model, config.revision, may_download=False)
        if path != DEMO_MODEL_PATH and config.load_format == "auto":
            check_weights(path, config.model, config.revision)
        return path, None
    except ModelNotDownloaded as error:
        if hub.is_offline or hub.problem is not None:
            return None, ModelFacts(problem=f"{error.message}, and Hugging Face is not reached", is_here=False)
        return None, model_on_hub(*split_revision(config.model, config.revision))
    except ConfigError as error:
        return None, ModelFacts(problem=error.message)


def model_on_hub(model: str, revision: str | None = None) -> ModelFacts:
    """Return what Hugging Face tells of a model, or of one GGUF file in a repository."""
    repository, file = "/".join(model.split("/")[:2]), "/".join(model.split("/")[2:])
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        problem = " ".join(str(error).split())
        return ModelFacts(problem=f"Hugging Face refuses model {model!r}: {problem}", is_here=False)
    wanted = [file] if file else [pattern for pattern in DOWNLOADED if pattern.endswith("safetensors")]
    ignored = [] if file else IGNORED
    sizes = [
        each.size or 0
        for each in info.siblings or ()
        if any(fnmatch(each.rfilename, name) for name in wanted)
        and not any(fnmatch(each.rfilename, name) for name in ignored)
    ]
    if not sizes:
        missing = repr(file) if file else "*.safetensors"
        return ModelFacts(problem=f"the repository {repository!r} of Hugging Face has no {missing}", is_here=False)
    return ModelFacts(
        weight_format="GGUF" if file else "safetensors",
        file_bytes=sum(sizes),
        num_parameters=0 if file or info.safetensors is None else info.safetensors.total,
        is_here=False,
    )


def _ask_worker(model: Path | None) -> tuple[WorkerFacts | None, str]:
    """Return what a worker's Python finds, or how it fails."""
    # -P: a `workers` folder in the current directory must not hide ours.
    command = [sys.executable, "-P", "-m", "servekit.worker", "--facts"]
    command += [] if model is None else ["--model", str(model)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=WORKER_TIMEOUT_S, env=worker_environment()
        )
    except subprocess.TimeoutExpired:
        return None, f"importing torch and loading the C kernels took more than {WORKER_TIMEOUT_S:g} s"
    if done.returncode < 0:
        with contextlib.suppress(ValueError):
            return None, f"the worker's Python was killed by {signal.Signals(-done.returncode).name}"
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(done.stdout, type=WorkerFacts), ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return None, lines[-1] if lines else f"the worker's Python ended with code {done.returncode}"


def _processor() -> Processor:
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (PROC / "cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    features = fields.get("flags") or fields.get("Features") or ""
    name = fields.get("model name") or platform.processor() or "processor"
    return Processor(name=name, architecture=platform.machine(), features=frozenset(features.split()))


def _groups() -> list[str]:
    """Return the paths of this process's control groups: `cpu:/a/b`; of version 2 `:/a/b`."""
    with contextlib.suppress(OSError):
        return [line.partition(":")[2] for line in (PROC / "self/cgroup").read_text().splitlines()]
    return []


def _group_files(root: Path, groups: Sequence[str], controller: str, name: str, old_name: str) -> Iterator[str]:
    """Yield the content of a file in this process's control group and those above it, of version 2 and 1.

    Inside a container, the group is the root of what is mounted, whatever its path says; then only that is there.
    """
    for group in groups:
        controllers, _, path = group.partition(":")
        if controllers == "":
            folder, file = root, name
        elif controller in controllers.split(","):
            folder, file = root / controllers, old_name
            folder = folder if folder.exists() else root / controller
        else:
            continue
        parts = Path(path).parts[1:]
        for depth in range(len(parts), -1, -1):
            with contextlib.suppress(OSError):
                yield folder.joinpath(*parts[:depth], file).read_text().strip()


def cpu_quota(root: Path, groups: Sequence[str]) -> float | None:
    """Return how many cores' time the control groups allow; None for as much as there is."""
    quotas = []
    for text in _group_files(root, groups, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal():  # neither "max" nor "-1"
            quotas.append(int(quota) / int(period or 100_000))  # version 1 has the period in another file
    return min(quotas, default=None)


def memory_limit(root: Path, groups: Sequence[str]) -> int | None:
    """Return the bytes of memory that the control groups allow; None for as much as there is."""
    texts = _group_files(root, groups, "memory", "memory.max", "memory.limit_in_bytes")
    return min((int(text) for text in texts if text.isdecimal() and int(text) < 2**60), default=None)


def _memory() -> Memory:
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in (PROC / "meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Memory(
        total=total,
        available=fields.get("MemAvailable", total),
        limit=memory_limit(GROUPS, _groups()),
        huge_pages=_chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")) or "unknown",
    )


def _chosen(path: Path) -> str:
    """Return the word in brackets, as in `always [madvise] never`."""
    with contextlib.suppress(OSError):
        return path.read_text().partition("[")[2].partition("]")[0]
    return ""


def _clock() -> Clock:
    source = "unknown"
    with contextlib.suppress(OSError):
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    began_ns = time.monotonic_ns()
    for _ in range(CLOCK_READS):
        time.monotonic_ns()
    read_ns = (time.monotonic_ns() - began_ns) / CLOCK_READS
    behind_s = max(0.0, os.stat(__file__).st_mtime - time.time())
    return Clock(source=source, read_ns=read_ns, behind_s=behind_s)


def look_at_folder(path: Path) -> Folder:
    """Look at a folder, or at the nearest one above that exists, because the server makes it. A file is written."""
    with contextlib.suppress(RuntimeError):  # the user has no home
        path = path.expanduser()
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        return Folder(path=str(path), free_bytes=shutil.disk_usage(existing).free)
    except OSError as error:
        return Folder(path=str(path), problem=error.strerror or str(error))


def _temporary_folder() -> Folder:
    try:
        return look_at_folder(Path(tempfile.gettempdir()))
    except FileNotFoundError:
        return Folder(path="TMPDIR", problem="no folder for temporary files can be written")


def _limits() -> Limits:
    def hard(limit: int) -> int | None:
        value = resource.getrlimit(limit)[1]
        return None if value == resource.RLIM_INFINITY else value

    return Limits(
        open_files=hard(resource.RLIMIT_NOFILE),
        reserved_files=RESERVED_FILES,
        processes=None if os.geteuid() == 0 else hard(resource.RLIMIT_NPROC),  # it does not hold for root
        address_space_bytes=hard(resource.RLIMIT_AS),
    )


def _port(config: ServeConfig) -> Port:
    try:
        bind(config).close()
    except ConfigError as error:
        problem = error.message.partition(";")[0]  # the remedy is the check's
        return Port(host=config.host, port=config.port, problem=problem, holder=_holder(config.port))
    return Port(host=config.host, port=config.port)


def _holder(port: int) -> str | None:
    """Return which process listens on the port, if this user may see it."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # it listens
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(file) in inodes for file in (folder / "fd").iterdir()):
                return f"process {folder.name} ({(folder / 'comm').read_text().strip()})"
    return None


def _hub() -> Hub:
    address, has_token = constants.ENDPOINT, get_token() is not None
    if constants.HF_HUB_OFFLINE:
        return Hub(address=address, is_offline=True, has_token=has_token)
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_TIMEOUT_S):  # noqa: S310
            problem = None
    except urllib.error.HTTPError as error:
        problem = None if error.code < 500 else f"it answers {error.code}"
    except (OSError, ValueError) as error:
        problem = str(getattr(error, "reason", error))
    return Hub(address=address, problem=problem, has_token=has_token)


def missing_packages(extra: str) -> tuple[str, ...]:
    """Return the requirements of an extra of servekit whose packages are not installed."""
    missing = []
    for requirement in importlib.metadata.requires("servekit") or ():
        name, _, condition = requirement.partition(";")
        if f"extra == '{extra}'" not in condition.replace('"', "'"):
            continue
        try:
            importlib.metadata.version(name.strip().split(">")[0].split("=")[0].split("<")[0].split("[")[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(name.strip())
    return tuple(missing)


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, or None if there is none."""
    with contextlib.suppress(OSError):
        words = (PROC / "driver/nvidia/version").read_text().split()
        return next((word for word in words if word[0].isdecimal() and "." in word), "of unknown version")
    return None
