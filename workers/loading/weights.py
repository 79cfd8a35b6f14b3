"""Build a model's layers with weights: those of its files, or random ones of the same shape."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from workers.loading.checkpoint import check_num_layers, check_num_parameters, count_tensors, find_weights
from workers.loading.language_part import build, model_class_of
from workers.loading.progress import Progress

SEED = 20261  # of random weights: a worker that replaces a lost one has to have the same


def read_weights(
    path: Path,
    config: Any,
    dtype: str | torch.dtype,
    attention: str | None,
    progress: Progress,
    model_class: Any = None,
) -> tuple[PreTrainedModel, int]:
    """Return the model with the weights of its files, on the CPU, and their size in bytes there.

    `attention` is the implementation of attention by its name in transformers; None lets transformers choose.
    `model_class` is another class than the one that the configuration stands for.

    transformers maps the files and reads what it has to convert to another dtype. The rest is read by the first copy:
    to a GPU, or into the layout that a CPU multiplies with. So nothing is copied twice, and a loader of our own would
    have nothing to save: 2.2 GB of bfloat16 took 0.1 s here, and 2.5 s where they were to be float32, for which
    converting one tensor after the other and nothing else took 3.6 s (two cores, files in the page cache).

    Raises ConfigError, SafetensorError, and various errors of transformers for files that are not a model.
    """
    files = find_weights(path)
    check_extent(config, files, count_tensors(files))
    with tensors_counted(progress):
        # With loading info it answers a pair, which its annotations do not know.
        loaded: Any = (model_class or model_class_of(config)).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model: PreTrainedModel
    model, report = loaded
    check_complete(report, path)
    return model, sum(file.stat().st_size for file in files)


def make_weights(
    config: Any, dtype: str | torch.dtype, attention: str, device: torch.device
) -> tuple[PreTrainedModel, int]:
    """Return the model with random weights, made on the device, and their size in bytes, to measure without files.

    They are distributed as before training, which transformers knows for each family: nearly everywhere a normal
    distribution with a deviation of 0.02, ones for norms and zeros for biases. All zeros would be faster to multiply on
    some devices, and would choose the same experts for every token.
    """
    if isinstance(dtype, str):  # auto: the checkpoint's own; bfloat16, the most frequent, where config.json has none
        dtype = config.get_text_config().dtype or torch.bfloat16
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        # Without this, torch's layers draw random values of their own first, which takes as long again.
        with torch.device(device), no_init_weights():
            model = build(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
        with torch.no_grad():
            model.init_weights()
    return model, sum(parameter.nbytes for parameter in model.parameters())


def move(model: PreTrainedModel, device: torch.device, progress: Progress) -> None:
    """Move the model to the device, a module at a time, so that its progress can be reported."""
    if device.type != "cpu":
        leaves = [module for module in model.modules() if not any(True for _ in module.children())]
        sizes = [sum(parameter.nbytes for parameter in leaf.parameters()) for leaf in leaves]
        with progress.stage(f"copying the weights to {device}", sum(sizes)) as advance:
            for leaf, size in zip(leaves, sizes, strict=True):
                leaf.to(device)
                advance(size)
    model.to(device)  # type: ignore[arg-type]  # and tensors outside of leaf modules


def take_out_of_files(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Copy parameters that are parts of mapped files.

    transformers does not copy weights that have the model's data type. As long as one of them is in use, all of its
    file stays mapped, and the kernel counts what was read of it as memory of this process.
    """
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():  # torch has not allocated it
            parameter.data = parameter.data.clone()


def check_extent(config: Any, files: list[Path], num_tensors: int) -> PreTrainedModel:
    """Refuse what the files cannot hold: transformers would allocate it, and fill it with random numbers for hours.

    Returns the model without memory, on the device meta.
    """
    check_num_layers(num_tensors, config.get_text_config().num_hidden_layers)
    with torch.device("meta"):
        described = build(copy.deepcopy(config), attn_implementation="eager")
    check_num_parameters(files, described.num_parameters())
    return described


def check_complete(report: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint that lacks weights: transformers would fill them with random numbers."""
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of the model's weights, among them {', '.join(missing[:3])}; download them "
            "again"
        )


@contextmanager
def tensors_counted(progress: Progress) -> Iterator[None]:
    """Report each tensor that transformers puts into its place to `progress`, in place of transformers' own bar."""

    def counted(tensors: Iterable[Any]) -> Iterator[Any]:
        with progress.over("reading the weights", list(tensors)) as items:
            yield from items

    previous = transformers_logging.set_tqdm_hook(lambda _, arguments, __: counted(*arguments))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
