"""Load models: from a local directory of safetensors to layers whose attention runs over pages.

The layers are transformers' own. What they need from the KV cache is not read from their configuration, whose names
differ by family, but seen: one forward pass with an attention function that records what it is asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, GenerationConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from servekit.messages import ModelInfo
from workers.attention import PAGED_ATTENTION, score_of
from workers.checkpoint import WEIGHTS
from workers.kv_cache import LayerShape
from workers.paged_step import Score
from workers.progress import Progress
from workers.surgery import operate
from workers.weights import make_weights, move, read_weights

log = logging.getLogger("servekit.worker")

RECORDING_ATTENTION = "servekit_recording"
SAMPLE_TOKENS = 72  # the self-check halves them: more rows than few_rows.c takes, and then one alone


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and what serving needs to know of it."""

    model: PreTrainedModel
    decoder: nn.Module  # all of the model but its output head
    layers: list[LayerShape]
    scores: list[Score]  # and how each of them weighs keys
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    sample: Sample
    num_weight_bytes: int  # as they stand in the files, or were made up
    weights_time_s: float  # from the first look at them to layers that are ready to compute


@dataclass(frozen=True, slots=True)
class Sample:
    """What transformers' own layers, with its own attention, said of some tokens."""

    token_ids: tuple[int, ...]
    logits: Tensor  # [num_tokens, vocab_size] float32


class ModelManager:
    """Loads models onto one device."""

    def __init__(self, device: str) -> None:
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
                "choose another --device, such as cpu"
            )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)  # streams, events and Triton go to the current one, unasked
        # Its warnings are for people who call generate() with masks and padding; we do neither.
        transformers_logging.set_verbosity_error()

    def load(
        self,
        path: Path,
        dtype: str,
        max_model_len: int | None,
        *,
        load_format: str = "auto",
        tell: Callable[[str], None] = lambda _: None,
    ) -> LoadedModel:
        """Load the model in `path`; with the format `dummy` its weights are random, and no file holds any.

        `tell` hears of each stage. Raises ConfigError, by name, for what cannot be served.
        """
        started_s, progress = time.monotonic(), Progress(tell)
        config = _read_config(path)
        architecture = str((config.architectures or [config.model_type])[0])
        log.info("loading %s from %s", architecture, path)
        wanted = (config, self._resolve_dtype(dtype), PAGED_ATTENTION)
        with _refusals(architecture):
            if load_format == "dummy":
                progress.tell("making up the weights")
                model, num_bytes = make_weights(*wanted, self.device)
            else:
                model, num_bytes = read_weights(path, *wanted, progress)
        if dtype == "auto" and self.device.type == "cpu" and _multiplies_bfloat16() and config.dtype is torch.bfloat16:
            log.info("in float32, where tokens are exact; --dtype bfloat16, as the files are, would be twice as fast")
        move(model, self.device, progress)
        model.eval()
        calls, decoder = _record_layers(model, architecture)
        info = _describe(model, architecture, path, max_model_len)
        sample = _take_sample(model, info)
        shapes, scores = [call.shape for call in calls], [call.score for call in calls]
        with progress.over("laying out the weights", scores) as counted:
            decoder = operate(model, decoder, counted)
        time_s = time.monotonic() - started_s
        return LoadedModel(model, decoder, shapes, scores, info, self.device, model.dtype, sample, num_bytes, time_s)

    def _resolve_dtype(self, dtype: str) -> str | torch.dtype:
        if dtype != "auto":
            resolved: torch.dtype = getattr(torch, dtype)
            return resolved
        # float32 is what a CPU is exact in, and often fastest: many only emulate bfloat16. Where this one does not,
        # that it would be faster is said, not done: the tokens would depend on the machine.
        return torch.float32 if self.device.type == "cpu" else "auto"


def _multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@torch.inference_mode()
def _take_sample(model: PreTrainedModel, info: ModelInfo) -> Sample:
    num_tokens = min(SAMPLE_TOKENS, info.max_model_len, info.vocab_size)
    token_ids = torch.arange(num_tokens).mul(7).remainder(info.vocab_size)
    with attention_switched(model, "eager"):
        output = model(input_ids=token_ids[None].to(model.device), use_cache=False)
    return Sample(tuple(token_ids.tolist()), output.logits[0].float())


def _read_config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of a file that is not what it should be
        raise ConfigError(f"{path} holds no model configuration that can be served: {_in_a_line(error)}") from None
    if getattr(config, "transformers_weights", WEIGHTS) not in (None, WEIGHTS):
        raise ConfigError(f"{path / 'config.json'} has transformers_weights; the weights must be in {WEIGHTS}")
    return config


def _in_a_line(error: Exception) -> str:
    """What it says, and what it is where that is not said in transformers' own words."""
    said = " ".join(str(error).split())[:300]
    return said if said and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"


@contextmanager
def _refusals(architecture: str) -> Iterator[None]:
    """Turn what transformers says about a model it cannot run our way into a refusal by name."""
    try:
        yield
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"the model's weights are damaged or incomplete: {error}") from error
    except (ImportError, OSError, ValueError, NotImplementedError) as error:
        raise _refusal(architecture, _in_a_line(error)) from error
    except Exception as error:
        # Older model files choose among attention classes of their own, by name.
        if isinstance(error, KeyError) and error.args[0] in (PAGED_ATTENTION, RECORDING_ATTENTION):
            raise _refusal(architecture, "it brings its own attention") from error
        if "ignore_mismatched_sizes" in str(error):
            raise ConfigError("the model's weights have other shapes than its configuration describes") from error
        raise ConfigError(f"the model's files do not make a model: {_in_a_line(error)}") from error


def _refusal(architecture: str, why: str) -> ConfigError:
    return ConfigError(
        f"architecture {architecture} cannot be served: {why}. servekit serves decoders whose every layer goes "
        "through transformers' AttentionInterface, with full or sliding-window causal attention"
    )


# -- what the layers ask of attention ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    layer: int | None
    shape: LayerShape
    score: Score


def _record_layers(model: PreTrainedModel, architecture: str) -> tuple[list[_AttentionCall], nn.Module]:
    """Run one token through the model and see what each layer asks, and which module is the decoder.

    Raises ConfigError, by name.
    """
    calls: list[_AttentionCall] = []
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with (
        _refusals(architecture),
        torch.inference_mode(),
        attention_switched(model, RECORDING_ATTENTION),
        _decoders_recorded(model) as decoders,
    ):
        model(input_ids=token, position_ids=torch.zeros_like(token), use_cache=False, recorded_calls=calls)
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    if sorted(call.layer if call.layer is not None else -1 for call in calls) != list(range(num_layers)):
        raise _refusal(
            architecture, f"{len(calls)} of its {num_layers} layers used the attention interface as expected"
        )
    calls.sort(key=lambda call: call.layer or 0)
    _check_windows(config, calls, architecture)
    if not decoders:
        raise _refusal(architecture, "no part of it answers with its last hidden state")
    return calls, decoders[-1]


def _check_windows(config: Any, calls: list[_AttentionCall], architecture: str) -> None:
    """Refuse attention patterns that are only told to the mask, which paged attention never sees."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["full_attention"] * len(calls)
        if window and not any(call.score.window for call in calls):
            raise _refusal(architecture, f"its sliding window of {window} is not passed to the attention interface")
    for call, kind in zip(calls, kinds, strict=True):
        if kind == "sliding_attention" and not call.score.window:
            raise _refusal(architecture, f"layer {call.layer} slides but does not tell attention its window")
        if kind not in ("full_attention", "sliding_attention"):
            raise _refusal(architecture, f"layer {call.layer} is of kind {kind}")


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    recorded_calls: list[_AttentionCall],
    **options: Any,
) -> tuple[Tensor, None]:
    """Note what the layer asks for, and answer with zeros of the right shape."""
    shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    recorded_calls.append(_AttentionCall(getattr(module, "layer_idx", None), shape, score_of(query, options)))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(RECORDING_ATTENTION, _recording_attention)
AttentionMaskInterface.register(RECORDING_ATTENTION, lambda *_, **__: None)


@contextmanager
def attention_switched(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let the model's layers use another attention implementation for a while."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(PAGED_ATTENTION)


# -- the output head by itself ----------------------------------------------------------------------------------------

# Heads differ: some scale logits, some cap them, some have a bias. Rather than know them all, we let the model's own
# forward pass run again over what its decoder said before.


@contextmanager
def _decoders_recorded(model: PreTrainedModel) -> Iterator[list[nn.Module]]:
    """The parts of the model that answer with a last hidden state, in the order in which they come to their end.

    So the last of them is what the head is put upon.
    """
    finished: list[nn.Module] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):
            finished.append(module)

    handles = [module.register_forward_hook(note) for module in model.modules() if module is not model]
    try:
        yield finished
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def output_recorded(decoder: nn.Module) -> Iterator[list[Any]]:
    """What the decoder says for a while."""
    outputs: list[Any] = []
    handle = decoder.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


@contextmanager
def output_replayed(decoder: nn.Module, output: Any) -> Iterator[None]:
    """Let the decoder say the same again for a while, whatever it is asked, and compute nothing."""
    decoder.forward = lambda *_, **__: output  # the instance's, which goes before the class's
    try:
        yield
    finally:
        del decoder.forward


# -- what the manager wants to know -----------------------------------------------------------------------------------


def _describe(model: PreTrainedModel, architecture: str, path: Path, max_model_len: int | None) -> ModelInfo:
    config = model.config.get_text_config()
    generation = _generation_config(path)
    max_model_len = _resolve_max_model_len(config, max_model_len)
    _check_rope(config, max_model_len, architecture)
    return ModelInfo(
        architecture=architecture,
        num_parameters=model.num_parameters(),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(
            int(_within("eos_token_id", token_id, 0, 2**31 - 1))
            for token_id in _as_tuple(generation.eos_token_id) or _as_tuple(config.eos_token_id)
        ),
        default_temperature=_within("temperature", _default_temperature(generation), 0, 100),
        default_top_k=int(_within("top_k", getattr(generation, "top_k", None) or 0, -1, 2**31 - 1)),
        default_top_p=_within("top_p", getattr(generation, "top_p", None) or 1.0, 0, 1),
    )


def _within(name: str, value: Any, lowest: float, highest: float) -> float:
    """A number that the model's makers recommend. Raises ConfigError for one that no request could ask for."""
    if not isinstance(value, int | float) or not lowest <= value <= highest:
        raise ConfigError(f"the model's {name} = {str(value)[:40]!r} is no number from {lowest} to {highest}")
    return value


def _resolve_max_model_len(config: Any, wanted: int | None) -> int:
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if trained is None and wanted is None:
        raise ConfigError("the model does not tell its context length; set --max-model-len")
    if trained is not None and trained < 1:
        raise ConfigError(f"the model's configuration tells of a context of {trained} tokens")
    if trained is not None and wanted is not None and wanted > trained:
        raise ConfigError(f"max_model_len = {wanted} exceeds the model's context of {trained} tokens")
    return wanted or trained or 0


def _check_rope(config: Any, max_model_len: int, architecture: str) -> None:
    """Refuse positions that mean something else when a longer sequence is in the same step.

    transformers chooses longrope's factors by the largest position of a whole forward pass, which here belongs to
    somebody else. Within the original context there is nothing to choose.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type"), *(v.get("rope_type") for v in parameters.values() if isinstance(v, dict))}
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if "longrope" in kinds and (original is None or max_model_len > original):
        raise _refusal(
            architecture,
            f"its longrope positions depend on the longest sequence in a step beyond {original} tokens; "
            f"--max-model-len {original} serves it",
        )


def _generation_config(path: Path) -> GenerationConfig:
    """The model's own defaults for generation, from its generation_config.json if it has one."""
    if not (path / "generation_config.json").exists():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path / 'generation_config.json'}: {_in_a_line(error)}") from None


def _default_temperature(generation: GenerationConfig) -> float:
    """Sampling as the model's makers recommend it: greedy only where they say so."""
    if generation.do_sample is False:
        return 0.0
    return 1.0 if generation.temperature is None else generation.temperature


def _as_tuple(token_ids: int | list[int] | None) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
