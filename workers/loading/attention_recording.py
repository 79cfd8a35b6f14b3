"""Record how a model's layers call attention, by one forward pass with an attention function that notes its arguments.

Shapes, scales, windows and soft caps are not read from the configuration: its field names differ by model family.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from workers.attention.interface import AttentionParams
from workers.attention.selector import PAGED_ATTENTION, attention_params
from workers.kv_cache.pages import LayerShape
from workers.loading.decoder_output import decoders_recorded
from workers.loading.language_part import is_language_part
from workers.loading.own_attention import has_own_attention
from workers.loading.refusals import forward_errors_named, in_one_line, refusal
from workers.parallel.pipeline_stage import PipelineStage

log = logging.getLogger("servekit.worker")

RECORDING_ATTENTION = "servekit_recording"
STEP_KEYWORD = "paged"  # by which a model's call hands the step to attention; see attention/selector.py


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How one layer called attention."""

    module: nn.Module
    layer: int | None  # None if the module has no `layer_idx`
    shape: LayerShape
    params: AttentionParams
    is_passed_step: bool  # whether the model's keyword arguments reached the call
    is_causal: bool  # False if tokens attend to those after them, too


@dataclass(slots=True)
class RecordedModel:
    """What a model's recording pass found."""

    calls: list[AttentionCall]  # one a layer, in the order of the layers
    decoder: nn.Module  # all of the model but its output head


def record_attention(model: PreTrainedModel, architecture: str, stage: PipelineStage | None = None) -> RecordedModel:
    """Run one token through the model, and check that every layer calls attention in a way that runs over KV pages.

    Afterwards every attention call gets the step that the model is called with, also in models whose layers drop
    keyword arguments. Raises ConfigError, by name, for a model that cannot be served.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    failure = ""
    with (
        torch.inference_mode(),
        calls_recorded() as recorded,
        attention_switched(model, RECORDING_ATTENTION),
        decoders_recorded(model) as decoders,
    ):
        try:
            model(input_ids=token, position_ids=torch.zeros_like(token), use_cache=False, **{STEP_KEYWORD: recorded})
        except Exception as error:
            # If the model runs with its own attention, an error that names the layers without a call is more helpful
            # than an error from within them (MPT's is an AttributeError about its mask).
            _check_runs(model, token, architecture)
            log.debug("the forward pass of %s failed with a recording attention", architecture, exc_info=True)
            failure = in_one_line(error)
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    layers = range(num_layers) if stage is None else stage.layers_of(num_layers)
    _check_all_layers_called(model, recorded, layers, num_layers, architecture)
    calls = sorted(recorded, key=lambda call: call.layer or 0)
    _check_is_causal(calls, architecture)
    _check_windows(config, calls, layers, architecture)
    for index, call in enumerate(calls):
        call.module.layer_idx = index  # type: ignore[assignment]  # of the KV cache, which has this stage's layers only
    if not failure and decoders and not any(_takes_positions(decoder, config) for decoder in decoders):
        raise refusal(
            architecture,
            "it counts positions by the KV cache of transformers, and takes none (`position_ids`) from servekit",
        )
    if failure or not decoders:
        raise refusal(architecture, failure or "no part of it returns a last hidden state for the output head")
    without_step = [call.module for call in calls if not call.is_passed_step]
    if without_step:
        _StepKeyword(model, without_step)
    return RecordedModel(calls, decoders[-1])


def record_layer(config: Any, compute: Callable[[Any], object]) -> AttentionCall:
    """Return how a layer calls attention that is no part of a model, and let it attend over pages from now on.

    `config` is what the layer was made with. `compute` runs it over one token, and gets what stands for the step.
    Raises ValueError unless the layer makes one call, and hands on the step.
    """
    config._attn_implementation = RECORDING_ATTENTION
    with torch.inference_mode(), calls_recorded() as calls:
        compute(calls)
    config._attn_implementation = PAGED_ATTENTION
    if len(calls) != 1 or not calls[0].is_passed_step:
        raise ValueError(f"its layer makes {len(calls)} attention calls that get the step, and must make one")
    calls[0].module.layer_idx = 0  # type: ignore[assignment]  # of a KV cache with this layer only
    return calls[0]


def _check_runs(model: PreTrainedModel, token: Tensor, architecture: str) -> None:
    """Raise ConfigError if the model does not run with its own attention either: its configuration is wrong."""
    with attention_switched(model, "eager"), forward_errors_named(architecture, is_language_part(model)):
        # Models with only one implementation keep it, and transformers only logs this.
        if model.config._attn_implementation == "eager":
            model(input_ids=token, use_cache=False)


_recorded_calls: ContextVar[list[AttentionCall]] = ContextVar("recorded_calls")


@contextmanager
def calls_recorded() -> Iterator[list[AttentionCall]]:
    """Yield a list that fills with the calls of the recording attention."""
    calls: list[AttentionCall] = []
    token = _recorded_calls.set(calls)
    try:
        yield calls
    finally:
        _recorded_calls.reset(token)


def _recording_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Note what the layer asks for, and return zeros of the right shape [1, num_tokens, num_heads, value_dim]."""
    call = AttentionCall(
        module=module,
        layer=getattr(module, "layer_idx", None),
        shape=LayerShape(key.shape[1], key.shape[-1], value.shape[-1]),
        params=replace(attention_params(query, options), num_heads=query.shape[1]),
        is_passed_step=STEP_KEYWORD in options,
        is_causal=options.get("is_causal", getattr(module, "is_causal", None)) is not False,
    )
    _recorded_calls.get().append(call)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(RECORDING_ATTENTION, _recording_attention)
AttentionMaskInterface.register(RECORDING_ATTENTION, lambda *_, **__: None)


@contextmanager
def attention_switched(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let the model's layers use another attention implementation within the context."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(PAGED_ATTENTION)


class _StepKeyword:
    """Hands the step to attention modules whose decoder layers drop keyword arguments: StableLM, Nemotron.

    The call of the model leaves the step here, and each attention module takes it from here. So does the call of its
    decoder alone, which is how a draft model is called.
    """

    def __init__(self, model: PreTrainedModel, modules: list[nn.Module]) -> None:
        self._given: Mapping[str, Any] = {}
        for called in (model, model.base_model):
            called.register_forward_pre_hook(self._keep, with_kwargs=True)
            # Nothing is kept after the call. Otherwise a step would keep the KV cache's memory when its runner is
            # dropped.
            called.register_forward_hook(self._forget, always_call=True)
        for module in modules:
            module.register_forward_pre_hook(self._add, with_kwargs=True)

    def _keep(self, _: nn.Module, __: Any, options: Mapping[str, Any]) -> None:
        if STEP_KEYWORD in options:
            self._given = {STEP_KEYWORD: options[STEP_KEYWORD]}

    def _forget(self, *_: Any) -> None:
        self._given = {}

    def _add(self, _: nn.Module, arguments: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**options, **self._given}


def _check_all_layers_called(
    model: PreTrainedModel, calls: list[AttentionCall], layers: range, num_layers: int, architecture: str
) -> None:
    """Refuse a model unless each of its layers, or of this stage's, called attention once."""
    called = [call.layer if call.layer is not None else -1 for call in calls]
    if sorted(called) == list(layers):
        return
    missing = [layer for layer in layers if layer not in called]
    if not missing:
        raise refusal(
            architecture, f"its {len(layers)} layers made {len(calls)} attention calls, where each must make one"
        )
    raise refusal(
        architecture,
        f"{len(missing)} of its {len(layers)} layers ({_classes_of(model, missing, num_layers)}) do not call "
        "AttentionInterface",
    )


def _classes_of(model: PreTrainedModel, layers: list[int], num_layers: int) -> str:
    """The class names of these layers: of the entries of the model's list of layers, which has `num_layers`."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return ", ".join(sorted({type(module[layer]).__name__ for layer in layers}))
    return "of an unknown class"


def _takes_positions(decoder: nn.Module, config: Any) -> bool:
    """Whether a decoder takes positions of tokens, or has them added to its scores by an adapter."""
    return "position_ids" in inspect.signature(type(decoder).forward).parameters or has_own_attention(config)


def _check_is_causal(calls: list[AttentionCall], architecture: str) -> None:
    """Refuse models whose tokens attend to later tokens."""
    layers = [call.layer for call in calls if not call.is_causal]
    if layers:
        raise refusal(
            architecture,
            f"{len(layers)} of its {len(calls)} layers let each token attend to those after it, too",
        )


def _check_windows(config: Any, calls: list[AttentionCall], layers: range, architecture: str) -> None:
    """Refuse attention patterns that only the mask expresses: paged attention never sees the mask."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["full_attention"] * layers.stop
        if window and not any(call.params.window for call in calls):
            raise refusal(architecture, f"its sliding window of {window} is not passed to the attention interface")
    for call, layer in zip(calls, layers, strict=True):
        kind = kinds[layer]
        if kind == "sliding_attention" and not call.params.window:
            raise refusal(architecture, f"layer {call.layer} has a sliding window and does not pass it to attention")
        if kind not in ("full_attention", "sliding_attention"):
            raise refusal(architecture, f"layer {call.layer} is of kind {kind}")
