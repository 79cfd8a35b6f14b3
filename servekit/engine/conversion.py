"""Convert a model's files in an unprivileged process: pickled weights, and tokenizers of other programs.

The process imports torch and transformers, which this one does not. It may neither use the network nor write anywhere
but in the directory that it is given (workers/conversion/confinement.py), and is ended if it takes too long.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from servekit.errors import ConfigError
from servekit.executor.worker_process import WORKER_ENVIRONMENT, worker_environment
from servekit.protocol.conversion_job import ConversionJob, ConversionOutcome

log = logging.getLogger("servekit")

TOKENIZER_MEMORY_BYTES = 2**32  # the largest vocabularies, of 262,144 tokens, take a quarter of it
TOKENIZER_CPU_S = 300
# Weights: two copies of the largest file, because old ones cannot be mapped, and what is collected for a file of a
# gigabyte (workers/compression/checkpoint_writer.py) with the bytes that it is written as.
WEIGHTS_MEMORY_BYTES = 2**32
WEIGHTS_BYTES_PER_CPU_S = 2**24  # a hundredth of what two cores took
MAX_OUTPUT_BYTES = 2**16  # output of the process that is kept; more is read and discarded
MAX_ERROR_LENGTH = 2_000
# The variables that it gets: those that Python and the libraries need to start. Any other may contain a secret.
VARIABLES = frozenset({
    *WORKER_ENVIRONMENT, "HF_HUB_OFFLINE", "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV",
    "CONDA_PREFIX", "XDG_CACHE_HOME",
})  # fmt: skip
VARIABLE_PREFIXES = ("LC_", "LD_", "PYTHON")
MAX_SLOWDOWN = 10  # wall time for each second of processor time: disks may be slow


def weights_job(path: Path, output: Path, files: list[Path], with_tokenizer: bool) -> ConversionJob:
    """Return the job that writes pickled weights as safetensors, with limits that follow from the files' sizes.

    With `with_tokenizer` it writes tokenizer.json, too.
    """
    sizes = [file.stat().st_size for file in files]
    return ConversionJob(
        model=str(path),
        output=str(output),
        weights=True,
        tokenizer=with_tokenizer,
        memory_bytes=WEIGHTS_MEMORY_BYTES + 2 * max(sizes, default=0),
        cpu_s=TOKENIZER_CPU_S + sum(sizes) // WEIGHTS_BYTES_PER_CPU_S,
        parent_pid=os.getpid(),
    )


def tokenizer_job(path: Path, output: Path) -> ConversionJob:
    """Return the job that writes a tokenizer as tokenizer.json."""
    return ConversionJob(
        model=str(path),
        output=str(output),
        tokenizer=True,
        memory_bytes=TOKENIZER_MEMORY_BYTES,
        cpu_s=TOKENIZER_CPU_S,
        parent_pid=os.getpid(),
    )


def run_conversion(job: ConversionJob) -> ConversionOutcome:
    """Run the job in a process of its own, and return what it wrote. Raises ConfigError, in a sentence."""
    job = replace(job, model=os.path.realpath(job.model), output=os.path.realpath(job.output))
    # -P: a `workers` folder in the current directory must not hide ours.
    command = [sys.executable, "-P", "-m", "servekit.worker", "--convert", msgspec.json.encode(job).decode()]
    timeout_s = MAX_SLOWDOWN * job.cpu_s
    try:
        ended = _run(command, timeout_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the files in {job.model} took more than {timeout_s} s to convert, which is the limit"
        ) from None
    try:
        outcome = msgspec.json.decode(ended.stdout, type=ConversionOutcome)
    except msgspec.DecodeError:
        log.debug("what the process that converts wrote: %s", ended.stderr.decode("utf-8", "replace"))
        raise ConfigError(
            f"the files in {job.model} could not be converted: {_end_of(job, ended.returncode)}"
        ) from None
    if outcome.error:
        raise ConfigError(outcome.error[:MAX_ERROR_LENGTH])
    return outcome


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run the process, and return the end of what it wrote. Raises TimeoutExpired.

    A malicious file may control the process: it gets no terminal to write input to, and its output takes no memory
    beyond the bound.
    """
    deadline_s = time.monotonic() + timeout_s
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None and process.stderr is not None
        written = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
        try:
            for pipe in written:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(deadline_s - time.monotonic(), 0))
                if time.monotonic() >= deadline_s:
                    raise subprocess.TimeoutExpired(command, timeout_s)
                for key, _ in ready:
                    new = os.read(key.fd, MAX_OUTPUT_BYTES)
                    written[key.fd] = (written[key.fd] + new)[-MAX_OUTPUT_BYTES:]
                    if not new:
                        selector.unregister(key.fd)
            process.wait(max(deadline_s - time.monotonic(), 0))
        except BaseException:
            process.kill()
            raise
        output, errors = written.values()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _end_of(job: ConversionJob, exit_code: int) -> str:
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return (
            f"the process was killed; it may use {job.cpu_s} s of processor time, and the kernel kills it if the "
            "machine's memory is full"
        )
    if exit_code < 0:
        return f"the process crashed ({signal.Signals(-exit_code).name}), so the files are damaged or malicious"
    return f"the process ended with code {exit_code} (--log-level debug logs what it wrote)"


def _environment() -> dict[str, str]:
    """The environment of the process: no secrets, no network for the libraries, and no threads (confinement.py)."""
    environment = worker_environment({"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    return {
        **{name: environment[name] for name in environment if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)},
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
