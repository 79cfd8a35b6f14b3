"""Convert a model's files in a process without rights: pickled weights, and tokenizers of other programs.

The process imports torch and transformers, which this one does not. It may neither use the network nor write anywhere
but in the directory that it is given (workers/conversion/confinement.py), and is ended if it takes too long.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec.structs import replace

from servekit.config import ENVIRONMENT_PREFIX
from servekit.errors import ConfigError
from servekit.executor.worker_process import worker_environment
from servekit.protocol.conversion_job import ConversionJob, ConversionOutcome

log = logging.getLogger("servekit")

TOKENIZER_MEMORY_BYTES = 2**32  # the largest vocabularies, of 262,144 tokens, take a quarter of it
TOKENIZER_CPU_S = 300
# Weights: two copies of the largest file, because old ones cannot be mapped, and what is collected for a file of a
# gigabyte (workers/compression/checkpoint_writer.py) with the bytes that it is written as.
WEIGHTS_MEMORY_BYTES = 2**32
WEIGHTS_BYTES_PER_CPU_S = 2**24  # a hundredth of what two cores took
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
        ended = subprocess.run(command, capture_output=True, env=_environment(), timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the files in {job.model} took more than {timeout_s} s to convert, which is the limit"
        ) from None
    try:
        outcome = msgspec.json.decode(ended.stdout, type=ConversionOutcome)
    except msgspec.DecodeError:
        log.debug("what the process that converts wrote: %s", ended.stderr.decode("utf-8", "replace")[-10_000:])
        raise ConfigError(
            f"the files in {job.model} could not be converted: {_end_of(job, ended.returncode)}"
        ) from None
    if outcome.error:
        raise ConfigError(outcome.error)
    return outcome


def _end_of(job: ConversionJob, exit_code: int) -> str:
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return (
            f"the process was killed; it may use {job.cpu_s} s of processor time, and the kernel kills it if the "
            "machine's memory is full"
        )
    if exit_code < 0:
        return f"the process crashed ({signal.Signals(-exit_code).name}), so the files are damaged, or an attack"
    return f"the process ended with code {exit_code} (--log-level debug logs what it wrote)"


def _environment() -> dict[str, str]:
    """The environment of the process: without tokens and keys, and without the network for the libraries."""
    environment = worker_environment({"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENVIRONMENT_PREFIX) and "TOKEN" not in name and "SECRET" not in name
    }
