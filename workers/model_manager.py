"""Load models: from a local directory of safetensors to layers whose attention runs over pages.

The layers are transformers' own. What they need from the KV cache is not read from their configuration, whose names
differ by family, but seen: one forward pass with an attention function that records what it is asked.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from servekit.messages import ModelInfo
from workers.attention import PAGED_ATTENTION
from workers.checkpoint import WEIGHTS, check_num_layers, check_num_parameters, find_weights
from workers.kv_cache import LayerShape
from workers.packed_linear import can_pack, pack_linears

log = logging.getLogger("servekit.worker")

RECORDING_ATTENTION = "servekit_recording"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and what serving needs to know of it."""

    model: PreTrainedModel
    decoder: nn.Module  # all of the model but its output head
    layers: list[LayerShape]
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype


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
        # Its warnings are for people who call generate() with masks and padding; we do neither.
        transformers_logging.set_verbosity_error()
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()

    def load(self, path: Path, dtype: str, max_model_len: int | None) -> LoadedModel:
        """Load the model in `path`. Raises ConfigError, by name, for what cannot be served."""
        config = _read_config(path)
        architecture = str((config.architectures or [config.model_type])[0])
        files = find_weights(path)
        log.info("loading %s from %s", architecture, path)
        with _refusals(architecture):
            _check_extent(config, files)
            # With loading info it answers a pair, which its annotations do not know.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=self._resolve_dtype(dtype),
                attn_implementation=PAGED_ATTENTION,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        model: PreTrainedModel
        model, report = loaded
        _check_complete(report, path)
        model.to(self.device)  # type: ignore[arg-type]
        model.eval()
        layers, decoder = _record_layers(model, architecture)
        info = _describe(model, architecture, path, max_model_len)
        if self.device.type == "cpu" and can_pack(model.dtype):
            log.info("laid out %d weights for oneDNN", pack_linears(model))
        return LoadedModel(model, decoder, layers, info, self.device, model.dtype)

    def _resolve_dtype(self, dtype: str) -> str | torch.dtype:
        if dtype != "auto":
            resolved: torch.dtype = getattr(torch, dtype)
            return resolved
        # float32 is what a CPU is exact in, and often fastest: many CPUs only emulate bfloat16.
        return torch.float32 if self.device.type == "cpu" else "auto"


def _read_config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of a file that is not what it should be
        raise ConfigError(f"{path} holds no model configuration that can be served: {_in_a_line(error)}") from None
    if getattr(config, "transformers_weights", WEIGHTS) not in (None, WEIGHTS):
        raise ConfigError(f"{path / 'config.json'} has transformers_weights; the weights must be in {WEIGHTS}")
    return config


def _check_extent(config: Any, files: list[Path]) -> None:
    """Refuse what the files cannot hold: transformers would take the memory for it, and hours to fill it with noise."""
    check_num_layers(files, config.get_text_config().num_hidden_layers)
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
        )
    check_num_parameters(files, described.num_parameters())


def _check_complete(report: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint that lacks weights; transformers would fill them with noise and serve that."""
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise ConfigError(f"{path} lacks {len(missing)} of the model's weights, among them {', '.join(missing[:3])}")


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
    sliding_window: int | None


def _record_layers(model: PreTrainedModel, architecture: str) -> tuple[list[LayerShape], nn.Module]:
    """Run one token through the model and see what each layer stores, and which module is the decoder.

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
    return [call.shape for call in calls], decoders[-1]


def _check_windows(config: Any, calls: list[_AttentionCall], architecture: str) -> None:
    """Refuse attention patterns that are only told to the mask, which paged attention never sees."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["full_attention"] * len(calls)
        if window and not any(call.sliding_window for call in calls):
            raise _refusal(architecture, f"its sliding window of {window} is not passed to the attention interface")
    for call, kind in zip(calls, kinds, strict=True):
        if kind == "sliding_attention" and not call.sliding_window:
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
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Note what the layer asks for, and answer with zeros of the right shape."""
    shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    recorded_calls.append(_AttentionCall(getattr(module, "layer_idx", None), shape, sliding_window))
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
