"""Define the description of a machine: the values that the probes find and the checks use."""

from __future__ import annotations

from msgspec import Struct

from servekit.protocol.worker_facts import ModelFacts, WorkerFacts


class Processor(Struct, frozen=True, kw_only=True):
    """The kind of processor."""

    name: str
    architecture: str  # as platform.machine() calls it
    features: frozenset[str] = frozenset()  # as /proc/cpuinfo calls them


class Cores(Struct, frozen=True, kw_only=True):
    """The cores, and who may use them."""

    total: int
    usable: int  # by this process, by its affinity
    quota: float | None = None  # processor seconds in each second that the control group allows
    load: float = 0.0  # processes that ran or waited for a core in the last minute, on average


class Memory(Struct, frozen=True, kw_only=True):
    """The memory of the machine, and of the control group that this process is in, in bytes."""

    total: int
    available: int
    limit: int | None = None  # of the control group
    huge_pages: str = "madvise"  # when the kernel gives them: always, madvise or never


class Clock(Struct, frozen=True, kw_only=True):
    """How the machine tells the time."""

    source: str  # the kernel's name
    read_ns: float  # what it takes to read it
    behind_s: float = 0.0  # by how much the date is before that of servekit's own files


class Folder(Struct, frozen=True, kw_only=True):
    """A folder that servekit writes to."""

    path: str
    free_bytes: int = 0
    problem: str | None = None  # why nothing can be written


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of this process; None is no limit."""

    open_files: int | None = None  # up to which a process may raise its own
    reserved_files: int = 0  # that the server needs besides its connections
    processes: int | None = None
    address_space_bytes: int | None = None


class Port(Struct, frozen=True, kw_only=True):
    """The address to listen on."""

    host: str
    port: int
    problem: str | None = None  # why it cannot be listened on
    holder: str | None = None  # the process that has it, if that can be seen


class Hub(Struct, frozen=True, kw_only=True):
    """Hugging Face, or the mirror in its place."""

    address: str
    is_offline: bool = False  # by the variable HF_HUB_OFFLINE
    problem: str | None = None  # why it cannot be reached
    has_token: bool = False


class Machine(Struct, frozen=True, kw_only=True):
    """All that is known of a machine."""

    python_version: tuple[int, int, int]
    pointer_bits: int
    processor: Processor
    cores: Cores
    memory: Memory
    clock: Clock
    temporary: Folder
    cache: Folder
    models: Folder  # downloaded ones
    shared_memory: Folder
    limits: Limits
    port: Port
    hub: Hub
    missing_packages: dict[str, tuple[str, ...]]  # by extra of servekit, the requirements that are not installed
    driver: str | None  # the version of NVIDIA's driver
    worker: WorkerFacts | None  # None if the worker's Python fails
    worker_problem: str = ""  # how it fails
    model: ModelFacts | None = None  # None for a simulated model, and if the worker's Python fails
