"""Define the job that the server or `servekit convert` gives to the process that reads untrusted files of a model."""

from __future__ import annotations

from msgspec import Struct


class ConversionJob(Struct, frozen=True, kw_only=True):
    """Files of a model to be written in the formats that servekit reads. The process may not do anything else."""

    model: str  # directory
    output: str  # directory, which exists; the process can write nowhere else
    weights: bool = False  # write safetensors of the pickled weights
    tokenizer: bool = False  # write tokenizer.json of the tokenizer's other files
    memory_bytes: int  # that it may allocate, besides the interpreter's and the libraries' own
    cpu_s: int  # of processor time
    parent_pid: int


class ConversionOutcome(Struct, frozen=True, kw_only=True):
    """The last line that the process writes to standard output."""

    error: str = ""  # in a sentence; "" if everything has been written
    num_tensors: int = 0
    num_bytes: int = 0  # of the tensors
    num_files: int = 0  # of weights
