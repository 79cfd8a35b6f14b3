"""Check a machine: each check is a function from the machine and the settings to one result.

Statuses, from good to bad: `ok`; `limited`, an optional function does not work; `slow`; `broken`, `servekit serve` with
these settings will not start or not work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from servekit.config import CPU_KV_CACHE_BYTES, ServeConfig
from servekit.doctor.machine import Folder, Machine
from servekit.protocol.worker_facts import ModelFacts
from servekit.simulation.model import is_simulated

Status = Literal["ok", "limited", "slow", "broken"]

OLDEST_PYTHON = (3, 11)
# What the server, the worker, the mask process and the sandbox processes take on a CPU with the demo model, less its
# weights and its cache (docs/operations.md).
PROCESSES_BYTES = 1_000 * 10**6
SERVER_BYTES = 200 * 10**6  # with a simulated model
# A container has 64 MB of shared memory by default. NCCL takes some tens of MB for each pair of GPUs.
SHARED_MEMORY_BYTES = 2**30
FREE_BYTES = 100 * 10**6  # of a folder for temporary files and compiled kernels
NUM_PROCESSES = 512  # and threads: of all processes of a user
ADDRESS_SPACE_BYTES = 64 * 2**30  # torch reserves far more than it uses
SLOW_CLOCK_NS = 1_000
DAY_S = 86_400.0
OLDEST_FAST_GPU = (8, 0)  # the first with bfloat16 and flash attention
# Bytes of a parameter with --quantization, and its scale.
QUANTIZED_BYTES = {"int8": 1.05, "fp8": 1.05, "int4": 0.6, "w4a8": 0.6, "nf4": 0.6}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    why: str  # it matters
    remedy: str = ""  # unless the status is ok


def examine(machine: Machine, config: ServeConfig) -> list[Check]:
    """Return what is to be said of the machine, for a server with these settings."""
    found = [check(machine, config) for check in CHECKS]
    return [check for check in found if check is not None]


def _check(name: str, status: Status, found: str, why: str, remedy: str) -> Check:
    return Check(name=name, status=status, found=found, why=why, remedy="" if status == "ok" else remedy)


def _python(machine: Machine, config: ServeConfig) -> Check:
    is_wrong = machine.python_version < OLDEST_PYTHON or machine.pointer_bits < 64
    return _check(
        "Python",
        "broken" if is_wrong else "ok",
        f"{'.'.join(map(str, machine.python_version))}, {machine.pointer_bits} bits",
        "servekit needs Python 3.11 or newer, and torch a Python of 64 bits",
        "install servekit with another Python",
    )


# From the best: features of /proc/cpuinfo, and what they are called.
_INSTRUCTIONS = (
    ("amx_bf16", "AMX"),
    ("avx512_bf16", "AVX-512 with bfloat16"),
    ("avx512_vnni", "AVX-512 with VNNI"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("asimd", "NEON"),
)


def _processor(machine: Machine, config: ServeConfig) -> Check:
    processor, worker = machine.processor, machine.worker
    instructions = next((name for feature, name in _INSTRUCTIONS if feature in processor.features), None)
    runs_on_cpu = not _gpu_is_used(machine, config)
    found = f"{processor.name} ({processor.architecture}): {instructions or 'no wide instructions that kernels use'}"
    if runs_on_cpu and worker is not None and worker.torch.multiplies_bfloat16 and config.dtype == "auto":
        if machine.model is not None and machine.model.cpu_dtype == "bfloat16":
            found += "; --dtype auto is the checkpoint's bfloat16; float32 is exact, and takes about twice as long"
        else:
            found += "; --dtype bfloat16 is about twice as fast as float32, and less exact"
    return _check(
        "processor",
        "slow" if instructions is None and runs_on_cpu else "ok",
        found,
        "on a CPU, the widest instructions decide how fast matrices are multiplied",
        "use a processor with AVX2 or newer; in a virtual machine, let it have the host's type of processor",
    )


def _cores(machine: Machine, config: ServeConfig) -> Check:
    cores = machine.cores
    found = f"{cores.usable} of {cores.total}" if cores.usable < cores.total else f"{cores.total}"
    if cores.quota is not None:
        found += f", and processor time of {cores.quota:g} by the control group's quota"
    return _check(
        "cores",
        "slow" if _usable_cores(machine) < 2 else "ok",
        found,
        "HTTP and the scheduler take one core under load, and on a CPU the model takes all others",
        "give the server two cores or more",
    )


def _usable_cores(machine: Machine) -> float:
    cores = machine.cores
    return cores.usable if cores.quota is None else min(cores.usable, cores.quota)


def _load(machine: Machine, config: ServeConfig) -> Check:
    cores = machine.cores
    return _check(
        "other load",
        "slow" if cores.load > cores.usable else "ok",
        f"{cores.load:.1f} processes on {cores.usable} cores in the last minute",
        "processes that compute alongside a model's threads slow all of them down",
        "end other programs, or bind the server to cores of its own: taskset --cpu-list 0-3 servekit serve",
    )


def _torch(machine: Machine, config: ServeConfig) -> Check:
    why = "the worker computes with torch"
    if machine.worker is None:
        remedy = "install torch and servekit again; on a machine without a GPU take torch's build for CPUs"
        return _check("torch", "broken", machine.worker_problem, why, remedy)
    torch = machine.worker.torch
    build = "for CPUs" if torch.cuda is None else f"for CUDA {torch.cuda}"
    found = f"{torch.version} {build}, {torch.num_threads} threads"
    if _gpu_is_used(machine, config):
        return _check("torch", "ok", found, why, "")
    num_cores = max(1, round(_usable_cores(machine)))
    if torch.num_threads > num_cores:
        remedy = f"set OMP_NUM_THREADS={num_cores}, because threads without a core make the others wait"
        return _check("torch", "slow", found, why, remedy)
    # torch takes half of them by itself where two share a core.
    is_idle = torch.num_threads < num_cores // 2
    return _check("torch", "slow" if is_idle else "ok", found, why, f"set OMP_NUM_THREADS={num_cores}, or unset it")


def _kernels(machine: Machine, config: ServeConfig) -> Check | None:
    if machine.worker is None:
        return None
    kernels = machine.worker.kernels
    if _gpu_is_used(machine, config):
        return _check(
            "C compiler",
            "ok" if kernels.compiler else "broken",
            kernels.compiler or "none",
            "Triton compiles the launchers of its GPU kernels on this machine",
            "install gcc and the C library's headers (libc6-dev)",
        )
    return _check(
        "C kernels",
        "ok" if kernels.is_loaded else "slow",
        "; ".join(kernels.messages).removeprefix("C kernels: "),
        "on a CPU, steps take about twice as long without them",
        "install GCC 12 or newer, or Clang; or a wheel of `make wheel`, which holds compiled kernels",
    )


def _gpu(machine: Machine, config: ServeConfig) -> Check:
    why = "a GPU is many times as fast as a CPU"
    torch = None if machine.worker is None else machine.worker.torch
    if torch is not None and torch.gpus:
        is_old = any(gpu.capability < OLDEST_FAST_GPU for gpu in torch.gpus)
        gpus = "; ".join(f"{gpu.name}, {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free" for gpu in torch.gpus)
        return _check(
            "GPU",
            "slow" if is_old else "ok",
            f"{gpus}; driver {machine.driver or 'unknown'}",
            "GPUs before Ampere have neither bfloat16 nor flash attention" if is_old else why,
            "use a GPU of compute capability 8.0 or newer",
        )
    is_asked_for = config.device.startswith("cuda") or "cuda" in (config.devices or "")
    if machine.driver is None:
        return _check(
            "GPU",
            "broken" if is_asked_for else "ok",
            "there is no NVIDIA driver" if is_asked_for else "none, so the model runs on the CPU",
            "the settings ask for a GPU" if is_asked_for else why,
            "install the driver, let the container have the GPU (docker run --gpus all), or use --device cpu",
        )
    problem = "torch fails" if torch is None else torch.gpu_problem or "torch is built for CPUs"
    return _check(
        "GPU",
        "broken" if is_asked_for else "slow",
        f"driver {machine.driver}, but torch sees no GPU: {problem}",
        why,
        "install torch's build for a version of CUDA that the driver runs; nvidia-smi shows the newest",
    )


def _gpu_packages(machine: Machine, config: ServeConfig) -> Check | None:
    if machine.worker is None or not _gpu_is_used(machine, config):
        return None
    torch = machine.worker.torch
    return _check(
        "Triton, flash-attn",
        "ok" if torch.triton else "slow",
        f"Triton {torch.triton or 'is not installed'}, flash-attn {torch.flash_attn or 'is not installed'}",
        "attention and sampling on a GPU run in Triton's kernels; flash-attn is an alternative to torch's attention",
        "pip install triton, in the version that torch's package asks for",
    )


def _model(machine: Machine, config: ServeConfig) -> Check:
    facts = machine.model
    why = "its files decide whether it can be served, and how much memory it needs"
    if facts is None:
        found = f"{config.model}: {'simulated' if is_simulated(config.model) else 'unknown without torch'}"
    elif facts.problem is not None:
        found = facts.problem
    else:
        parameters = f"{facts.num_parameters:,} parameters, " if facts.num_parameters else ""
        name = facts.architecture or "not downloaded yet"
        found = f"{config.model}: {name}, {parameters}{facts.weight_format}, {_gib(facts.file_bytes)}"
    return _check(
        "model",
        "ok" if facts is None or facts.problem is None else "broken",
        found,
        why,
        "give a directory, a GGUF file or an id of Hugging Face, in a format of docs/quantization.md",
    )


def _memory(machine: Machine, config: ServeConfig) -> Check:
    memory, facts = machine.memory, machine.model
    most = memory.total if memory.limit is None else min(memory.total, memory.limit)
    available = min(memory.available, most)
    found = f"{_gib(available)} of {_gib(most)} available"
    if most < memory.total:
        found += " (the control group's limit)"
    needed = SERVER_BYTES if is_simulated(config.model) else PROCESSES_BYTES
    if facts is not None and not _gpu_is_used(machine, config):
        num_workers = (config.data_parallel_size or 1) if config.starts_workers else 0
        weights = num_workers * weight_bytes(facts, config, on_gpu=False)
        cache = num_workers * _cache_bytes(facts, config)
        needed += weights + cache
        found += f"; weights take {_gib(weights)}, the KV cache up to {_gib(cache)}"
    status: Status = "broken" if needed > most else "slow" if needed > available else "ok"
    return _check(
        "memory",
        status,
        f"{found}; all processes together about {_gib(needed)}",
        "when memory runs out, the kernel kills the worker",
        "choose a smaller model, --dtype bfloat16, --quantization int8, or a smaller --kv-cache-memory-bytes"
        if status == "broken"
        else "end other programs",
    )


def _gpu_memory(machine: Machine, config: ServeConfig) -> Check | None:
    facts, worker = machine.model, machine.worker
    if facts is None or worker is None or not _gpu_is_used(machine, config):
        return None
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    weights = weight_bytes(facts, config, on_gpu=True)
    usable = num_ranks * config.gpu_memory_utilization * min(gpu.total_bytes for gpu in worker.torch.gpus)
    found = f"weights take {_gib(weights)} of {_gib(usable)} that the settings allow"
    if facts.kv_numbers_per_token and usable > weights:
        token_bytes = facts.kv_numbers_per_token * _number_bytes(facts, config, on_gpu=True)
        found += f"; the rest holds at most {(usable - weights) / token_bytes:,.0f} tokens"
    return _check(
        "GPU memory",
        "broken" if weights > usable else "ok",
        found,
        "weights and KV cache must fit into it",
        "choose a smaller or quantized model, or divide it among GPUs (--tensor-parallel-size)",
    )


def weight_bytes(facts: ModelFacts, config: ServeConfig, *, on_gpu: bool) -> int:
    """Return about how much memory the weights of one copy of the model take."""
    if facts.is_quantized or not facts.num_parameters:
        return facts.file_bytes
    if config.quantization is not None:
        return int(facts.num_parameters * QUANTIZED_BYTES[config.quantization])
    return facts.num_parameters * _number_bytes(facts, config, on_gpu)


def _number_bytes(facts: ModelFacts, config: ServeConfig, on_gpu: bool) -> int:
    """Return the bytes of a number that is computed with."""
    if config.dtype != "auto":
        return DTYPE_BYTES[config.dtype]
    return (facts.file_number_bytes or 2) if on_gpu else DTYPE_BYTES[facts.cpu_dtype]


def _cache_bytes(facts: ModelFacts, config: ServeConfig) -> int:
    if config.num_kv_blocks is None:
        return config.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
    size = 1 if config.kv_cache_dtype != "auto" else _number_bytes(facts, config, on_gpu=False)
    return config.num_kv_blocks * config.block_size * facts.kv_numbers_per_token * size


def _huge_pages(machine: Machine, config: ServeConfig) -> Check | None:
    if _gpu_is_used(machine, config):
        return None
    setting = machine.memory.huge_pages
    return _check(
        "huge pages",
        "slow" if setting == "never" else "ok",
        setting,
        "a step on a CPU reads all weights, and takes about a tenth longer with small pages",
        "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _shared_memory(machine: Machine, config: ServeConfig) -> Check | None:
    if config.tensor_parallel_size * config.pipeline_parallel_size == 1 or not _gpu_is_used(machine, config):
        return None
    return _folder(
        machine.shared_memory,
        "shared memory",
        "the GPUs of a divided model exchange data there",
        "give the container more: docker run --shm-size 1g",
        "limited",
        SHARED_MEMORY_BYTES,
    )


def _folder(
    folder: Folder, name: str, why: str, remedy: str, if_not_writable: Status, needed_bytes: int = FREE_BYTES
) -> Check:
    if folder.problem is not None:
        return _check(name, if_not_writable, f"{folder.path}: {folder.problem}", why, remedy)
    status: Status = "ok" if folder.free_bytes >= needed_bytes else "limited"
    return _check(name, status, f"{folder.path}, {_gib(folder.free_bytes)} free", why, remedy)


def _temporary(machine: Machine, config: ServeConfig) -> Check:
    return _folder(
        machine.temporary,
        "temporary files",
        "torch and compilers need a folder for temporary files",
        "set --cache-dir, or TMPDIR, to a folder that can be written and has room",
        "broken",
    )


def _cache(machine: Machine, config: ServeConfig) -> Check:
    return _folder(
        machine.cache,
        "cache folder",
        "compiled kernels are kept there; without it, they are compiled at each start",
        "set --cache-dir, or XDG_CACHE_HOME, to a folder that can be written and has room",
        "slow",
    )


def _models(machine: Machine, config: ServeConfig) -> Check:
    facts = machine.model
    return _folder(
        machine.models,
        "downloaded models",
        "models of Hugging Face are kept there",
        "set --cache-dir, or HF_HOME, to a folder that can be written and has room",
        "limited",
        FREE_BYTES if facts is None or facts.is_here else facts.file_bytes,
    )


def _open_files(machine: Machine, config: ServeConfig) -> Check:
    limit, wanted = machine.limits.open_files, config.max_connections + machine.limits.reserved_files
    return _check(
        "open files",
        "limited" if limit is not None and limit < wanted else "ok",
        "no limit" if limit is None else f"at most {limit:,}; the settings need {wanted:,}",
        "each connection is an open file",
        "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or lower --max-connections",
    )


def _ulimits(machine: Machine, config: ServeConfig) -> Check:
    limits, short = machine.limits, []
    if limits.processes is not None and limits.processes < NUM_PROCESSES:
        short.append(f"at most {limits.processes} processes and threads (ulimit -u)")
    if limits.address_space_bytes is not None and limits.address_space_bytes < ADDRESS_SPACE_BYTES:
        short.append(f"at most {_gib(limits.address_space_bytes)} of addresses (ulimit -v)")
    return _check(
        "other limits",
        "limited" if short else "ok",
        "; ".join(short) or "none that matter",
        "the server starts processes and threads, and torch reserves more addresses than memory",
        "remove these limits for the server's user",
    )


def _port(machine: Machine, config: ServeConfig) -> Check:
    port = machine.port
    by = f", by {port.holder}" if port.holder else ""
    return _check(
        "port",
        "ok" if port.problem is None else "broken",
        f"{port.host}:{port.port} is free" if port.problem is None else f"{port.problem}{by}",
        "the server listens there",
        "end that program, or choose another --port (0 takes a free one) or --host",
    )


def _hub(machine: Machine, config: ServeConfig) -> Check:
    hub = machine.hub
    is_reached = not hub.is_offline and hub.problem is None
    token = "with a token" if hub.has_token else "without a token, so gated models cannot be downloaded"
    found = f"{hub.address} can be reached, {token}"
    if hub.problem is not None:
        found = f"{hub.address} cannot be reached: {hub.problem}"
    if hub.is_offline:
        found = "not used, because HF_HUB_OFFLINE is set"
    return _check(
        "Hugging Face",
        "ok" if is_reached else "limited",
        found,
        "models that are named by their id are downloaded from there",
        "give a directory or a GGUF file, which need no network; for a proxy set HTTPS_PROXY",
    )


def _clock(machine: Machine, config: ServeConfig) -> Check:
    clock = machine.clock
    found, why = f"{clock.source}, read in {clock.read_ns:.0f} ns", "each token and each step is timed several times"
    if clock.behind_s > DAY_S:
        found += f"; the date is {clock.behind_s / DAY_S:.0f} days before that of servekit's files"
        return _check("clock", "limited", found, "with a wrong date, TLS refuses certificates", "set the date")
    remedy = "let the kernel use the processor's counter (clocksource=tsc), or ask the host's owner"
    return _check("clock", "slow" if clock.read_ns > SLOW_CLOCK_NS else "ok", found, why, remedy)


def _extras(machine: Machine, config: ServeConfig) -> Check:
    missing = {extra: packages for extra, packages in machine.missing_packages.items() if packages}
    is_needed = config.otlp_endpoint is not None and "otel" in missing
    requirements = [each for packages in missing.values() for each in packages]
    return _check(
        "extras",
        "broken" if is_needed else "limited" if missing else "ok",
        "; ".join(f"{extra} lacks {', '.join(packages)}" for extra, packages in missing.items()) or "all installed",
        "terminal is for servekit chat, top, eval and batch, and otel for traces",
        f"pip install {' '.join(map(repr, requirements))}",
    )


def _gpu_is_used(machine: Machine, config: ServeConfig) -> bool:
    wants_cpu = config.device == "cpu" if config.devices is None else "cuda" not in config.devices
    return not wants_cpu and machine.worker is not None and bool(machine.worker.torch.gpus)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**27 else f"{num_bytes / 2**30:.1f} GiB"


CHECKS: tuple[Callable[[Machine, ServeConfig], Check | None], ...] = (
    _python,
    _processor,
    _cores,
    _load,
    _torch,
    _kernels,
    _gpu,
    _gpu_packages,
    _model,
    _memory,
    _gpu_memory,
    _huge_pages,
    _shared_memory,
    _temporary,
    _cache,
    _models,
    _open_files,
    _ulimits,
    _port,
    _hub,
    _clock,
    _extras,
)
