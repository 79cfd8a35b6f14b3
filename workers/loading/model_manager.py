"""Load models: from a local directory of safetensors to transformers layers whose attention runs over KV pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from servekit.protocol.cpu_dtype import CONFIG_KEY, cpu_dtype
from servekit.protocol.messages import ModelInfo
from workers.attention.interface import AttentionParams
from workers.attention.selector import PAGED_ATTENTION
from workers.device.heap import trim_heap
from workers.device.memory import allocation_refused_as
from workers.kv_cache.pages import LayerShape
from workers.layers.layer_replacement import replace_layers
from workers.layers.linear import can_pack
from workers.loading.attention_recording import attention_switched, record_attention
from workers.loading.checkpoint import quantization_config
from workers.loading.gguf_index import has_gguf
from workers.loading.language_part import is_language_part, notice_of, takes_more_than_text
from workers.loading.model_config import architecture_of, check_is_decoder, describe_model, read_config
from workers.loading.own_attention import OWN_IMPLEMENTATION, adapt_own_attention, has_own_attention
from workers.loading.progress import Progress
from workers.loading.quantized_weights import (
    num_quantized_parameters,
    num_weight_bytes,
    quantize_weights,
    read_quantized_weights,
    rounds_activations,
)
from workers.loading.refusals import forward_errors_named, loading_errors_named, refusal
from workers.loading.weights import make_weights, move, read_weights, take_out_of_files
from workers.lora.lora_pool import LoraPool
from workers.parallel.collectives import add_collectives, with_collectives
from workers.parallel.linear_parts import LinearParts
from workers.parallel.local_parameters import partial_class, use_local_parameters
from workers.parallel.ranks import Ranks
from workers.parallel.tensor_parallel_plan import TensorParallelPlan
from workers.quantization.at_load import QuantizedAtLoad
from workers.quantization.formats.gguf import Gguf
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.formats.registry import format_of, name_of

log = logging.getLogger("servekit.worker")

SAMPLE_TOKENS = 72  # half of them are more rows than a call of all layers takes; the self-check has few rows, too


@dataclass(frozen=True, slots=True)
class Sample:
    """Logits that transformers' own layers, with its own attention, compute for some tokens."""

    token_ids: tuple[int, ...]
    logits: Tensor  # [num_tokens, vocab_size] float32


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """How large the weights are, and how long they took to load."""

    num_bytes: int  # in the files; in memory, where they are quantized, random, or one of several ranks'
    time_s: float  # from the first look at the files to layers that are ready to compute


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run over KV pages, and what serving it needs to know."""

    model: PreTrainedModel
    decoder: nn.Module  # all of the model but its output head
    layers: list[LayerShape]  # the heads of each layer's keys and values
    attention_params: list[AttentionParams]  # how each layer weighs keys
    info: ModelInfo  # what the manager gets
    device: torch.device
    dtype: torch.dtype
    sample: Sample  # for the self-check
    weights: WeightsLoaded
    ranks: Ranks | None = None  # those that hold the other parts of the model
    lora: LoraPool | None = None  # the adapters in memory, if any may be
    rounds_activations: bool = False  # weights are multiplied by int8


def torch_device(device: str) -> torch.device:
    """Return the device that torch names so, or "auto" chooses, and use it from now on.

    Raises ConfigError for a CUDA device that torch does not see.
    """
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "choose another --device, such as cpu"
        )
    if found.type == "cuda":
        found = torch.device("cuda", found.index or 0)  # as tensors have it: the sampler is checked once a device
        torch.cuda.set_device(found)  # streams, events and Triton use the current device
    return found


class ModelManager:
    """Loads models, or one rank's part of each layer, onto one device."""

    def __init__(self, device: str) -> None:
        """`device` is as torch names it, or "auto". Raises ConfigError for a CUDA device that torch does not see."""
        self.device = torch_device(device)
        # transformers' warnings are about generate() with masks and padding, which servekit does not use.
        transformers_logging.set_verbosity_error()

    def load(
        self,
        path: Path,
        dtype: str,
        max_model_len: int | None,
        *,
        load_format: str = "auto",
        quantization: str | None = None,
        quantization_group_size: int | None = None,
        report_stage: Callable[[str], None] = lambda _: None,
        ranks: Ranks | None = None,
        max_loras: int = 0,
        max_lora_rank: int = 0,
    ) -> LoadedModel:
        """Load the model in `path`; with the format `dummy` its weights are random, and no file of weights is read.

        `quantization` names a format of workers/quantization/at_load.py that unquantized weights are rounded to.
        `report_stage` is called with the name of each stage. With `ranks`, only this rank's part is read; all of them
        must call this with the same arguments. `max_loras` adapters of rank `max_lora_rank` have a place. Raises
        ConfigError, by name, for what cannot be served.
        """
        started_s, progress = time.monotonic(), Progress(report_stage)
        weight_format = _weight_format(path, load_format, quantization, quantization_group_size)
        config = read_config(path)
        check_is_decoder(config)
        architecture = architecture_of(config)
        if ranks is not None and takes_more_than_text(config):
            raise refusal(
                architecture,
                "a model that takes images, too, is served by one process for each replica",
                "leave out --tensor-parallel-size and --pipeline-parallel-size",
            )
        log.info("loading %s from %s", architecture, path)
        if notice := notice_of(config, architecture):
            log.warning("%s", notice)
        load_dtype = self._resolve_dtype(dtype, config, weight_format is not None, ranks)
        remedy = "choose a smaller model, a dtype of fewer bytes (--dtype), or a device with more memory"
        with loading_errors_named(architecture), allocation_refused_as("the model's weights", self.device, remedy):
            if load_format == "dummy":
                model, num_bytes = self._make_random(config, load_dtype, weight_format, progress, ranks)
            else:
                model, num_bytes = _read(path, config, load_dtype, architecture, weight_format, progress, ranks)
            num_parameters, plan = model.num_parameters() + num_quantized_parameters(model), None
            group = stage = None
            if ranks is not None:
                group, stage = ranks.group, ranks.stage
                num_parameters = model.num_parameters_of_all_ranks  # type: ignore[assignment]
            if group is not None:
                plan = TensorParallelPlan.of(model, architecture, group.size)
                use_local_parameters(model, group, plan)
            if ranks is not None:
                num_bytes = num_weight_bytes(model)  # the files have all ranks' parts
            move(model, self.device, progress)
        model.eval()
        adapt_own_attention(model)
        model_dtype = model.dtype  # asked for now: later, a stage of a pipeline may have no plain parameters left
        with with_collectives(model, plan, group):
            recorded = record_attention(model, architecture, stage)
            name = "" if weight_format is None else weight_format.name
            info = describe_model(model.config, num_parameters, path, max_model_len, name)
            with forward_errors_named(architecture, is_language_part(model)):
                sample = _take_sample(model, info)
        num_columns = sample.logits.shape[-1]
        if (stage is None or stage.is_last) and num_columns != info.vocab_size:
            raise refusal(architecture, f"its head returns {num_columns} logits for {info.vocab_size} tokens")
        trim_heap()  # frees matrices that the sample's layers dequantized, before others are prepared
        shapes, params = [call.shape for call in recorded.calls], [call.params for call in recorded.calls]
        rounds = rounds_activations(model)
        # Fused layers keep norms and biases as they are.
        take_out_of_files(parameter for parameter in model.parameters() if parameter.ndim == 1)
        parts = None if plan is None or group is None else LinearParts(plan, group)
        lora = LoraPool(max_loras, max_lora_rank, model_dtype, self.device, parts) if max_loras else None
        with progress.over("laying out the weights", params, trim_heap) as counted:
            decoder = replace_layers(model, recorded.decoder, counted, ranks, lora)
        take_out_of_files(model.parameters())
        if group is not None and plan is not None:
            add_collectives(model, plan, group)
        weights = WeightsLoaded(num_bytes, time.monotonic() - started_s)
        return LoadedModel(
            model, decoder, shapes, params, info, self.device, model_dtype, sample, weights, ranks, lora, rounds
        )

    def _make_random(
        self,
        config: PreTrainedConfig,
        dtype: str | torch.dtype,
        weight_format: WeightFormat | None,
        progress: Progress,
        ranks: Ranks | None,
    ) -> tuple[PreTrainedModel, int]:
        """Return a model of random weights, and their size in bytes. Raises ConfigError if there are several ranks."""
        if ranks is not None:
            raise ConfigError(
                "random weights (--load-format dummy) cannot be divided among ranks; use --load-format auto"
            )
        progress.report("making random weights")
        device = self.device if weight_format is None else torch.device("cpu")
        attention = OWN_IMPLEMENTATION if has_own_attention(config) else PAGED_ATTENTION
        model, num_bytes = make_weights(config, dtype, attention, device)
        if weight_format is None:
            return model, num_bytes
        quantize_weights(model, weight_format, progress)
        return model, num_weight_bytes(model)

    def _resolve_dtype(
        self, dtype: str, config: PreTrainedConfig, is_quantized: bool, ranks: Ranks | None
    ) -> str | torch.dtype:
        if dtype != "auto":
            resolved: torch.dtype = getattr(torch, dtype)
            return resolved
        if self.device.type != "cpu":
            return "auto"
        # Most CPUs only emulate bfloat16, more slowly than they compute in float32. Quantized weights have float32
        # beside them, because their formats name a type for GPUs.
        stored = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
        chosen = cpu_dtype(stored, getattr(config, CONFIG_KEY, None))
        is_bfloat16 = chosen == "bfloat16" and can_pack(torch.bfloat16)
        if ranks is not None:  # they may be on machines with different processors, and exchange numbers of one type
            is_bfloat16 = bool(ranks.minimum(int(is_bfloat16)))
        if is_bfloat16 and not is_quantized:
            log.info(
                "computing in bfloat16, the checkpoint's data type; --dtype float32 gives exact tokens and takes about "
                "twice as long"
            )
            return torch.bfloat16
        if is_bfloat16:
            log.info(
                "computing in float32, because the weights are quantized; --dtype bfloat16 is faster in steps of many "
                "tokens"
            )
        return torch.float32


def _read(
    path: Path,
    config: PreTrainedConfig,
    dtype: str | torch.dtype,
    architecture: str,
    weight_format: WeightFormat | None,
    progress: Progress,
    ranks: Ranks | None,
) -> tuple[PreTrainedModel, int]:
    """Return a model with the weights of the files, or one rank's part of them, and their size in bytes."""
    attention = OWN_IMPLEMENTATION if has_own_attention(config) else PAGED_ATTENTION
    if weight_format is not None:
        return read_quantized_weights(path, config, dtype, attention, progress, weight_format, architecture, ranks)
    model_class = None if ranks is None else partial_class(config, architecture, ranks)
    return read_weights(path, config, dtype, attention, progress, model_class)


def _weight_format(
    path: Path, load_format: str, quantization: str | None, group_size: int | None
) -> WeightFormat | None:
    """Return the format of the weights: that of the files, or the one that they are to be rounded to.

    Returns None for weights of safetensors that are not quantized. Raises ConfigError for a format that is not read.
    """
    described = quantization_config(path)
    if described is not None and load_format == "dummy":
        log.warning(
            "config.json describes weights in the format %s; the random weights do not have it", name_of(described)
        )
    elif described is not None and quantization is not None:
        raise ConfigError(
            f"quantization = {quantization!r}: the weights in {path} are quantized already, in the format "
            f"{name_of(described)}; leave out --quantization, or serve the unquantized checkpoint of the same model"
        )
    elif described is not None:
        return format_of(described)
    if quantization is None:
        if group_size is not None:
            raise ConfigError(
                f"quantization_group_size = {group_size} has no use without --quantization; leave it out, or choose a "
                "--quantization"
            )
        return Gguf() if has_gguf(path) and load_format != "dummy" else None
    return QuantizedAtLoad(quantization, group_size)


@torch.inference_mode()
def _take_sample(model: PreTrainedModel, info: ModelInfo) -> Sample:
    """Compute the logits of SAMPLE_TOKENS tokens with the layers and the attention of transformers."""
    num_tokens = min(SAMPLE_TOKENS, info.max_model_len, info.vocab_size)
    token_ids = torch.arange(num_tokens).mul(7).remainder(info.vocab_size)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(padding, int):  # some models do not count padding tokens in positions
        token_ids[token_ids == padding] = (padding + 1) % info.vocab_size
    with attention_switched(model, "eager"):
        output = model(input_ids=token_ids[None].to(model.device), use_cache=False)
    return Sample(tuple(token_ids.tolist()), output.logits[0].float())
