"""Run a conversion in this process, which drops its privileges before it reads the first byte of the model."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from servekit.protocol.child_process import die_with_parent
from servekit.protocol.conversion_job import ConversionJob, ConversionOutcome
from workers.conversion.confinement import confine
from workers.conversion.pickled_weights import convert_weights, find_pickled_weights
from workers.conversion.tokenizer import convert_tokenizer


def convert(job: ConversionJob) -> ConversionOutcome:
    """Write what the job asks for. The outcome has the error, in a sentence."""
    die_with_parent(job.parent_pid)
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    path, output = Path(job.model), Path(job.output)
    os.chdir(output)
    num_tensors = num_bytes = num_files = 0
    try:
        confine(output, job.memory_bytes, job.cpu_s)
        if job.weights:
            num_tensors, num_bytes, num_files = convert_weights(find_pickled_weights(path), output)
        if job.tokenizer:
            convert_tokenizer(path, output)
    except ConfigError as error:
        return ConversionOutcome(error=error.message)
    except (OSError, SafetensorError) as error:  # a full disk, most of all
        return ConversionOutcome(error=f"the files in {path} cannot be read, or nothing more can be written: {error}")
    except MemoryError:
        return ConversionOutcome(error=f"the files in {path} take more memory than their size allows")
    return ConversionOutcome(num_tensors=num_tensors, num_bytes=num_bytes, num_files=num_files)
