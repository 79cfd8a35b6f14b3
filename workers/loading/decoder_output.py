"""Find a model's decoder, keep what it computes, and run the model's output head again over it.

Output heads differ: some scale logits, some cap them, some have a bias. So servekit does not rebuild them. It runs the
model's own forward pass again, in which the decoder returns the hidden states that it computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from servekit.errors import ConfigError
from workers.layers.fused_decoder import FusedDecoder
from workers.layers.layer_tap import LayerTap


@contextmanager
def decoders_recorded(model: PreTrainedModel) -> Iterator[list[nn.Module]]:
    """Yield a list that fills with the parts of the model that return a last hidden state, in order of completion.

    The last of them is the decoder: its output is the output head's input.
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


def tap_layers(decoder: nn.Module, layers: tuple[int, ...], num_layers: int) -> LayerTap:
    """Return a tap that each forward pass of the decoder fills with what enters these of its layers.

    A decoder has one tap. Raises ConfigError if it has no list of its layers.
    """
    tap: LayerTap | None = getattr(decoder, "tap", None)
    if tap is not None and tap.layers == layers:
        return tap
    assert tap is None, "the decoder has a tap for other layers"
    fused = next((each for each in decoder.modules() if isinstance(each, FusedDecoder)), None)
    decoder.tap = tap = LayerTap(layers, 1.0 if fused is None else fused.residual_multiplier)  # type: ignore[assignment]
    if fused is None:
        _add_hooks(decoder, tap, num_layers)
    else:
        fused.tap = tap
    return tap


def _add_hooks(decoder: nn.Module, tap: LayerTap, num_layers: int) -> None:
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    if not lists:
        raise ConfigError(
            f"{type(decoder).__name__} has no list of {num_layers} layers, so a drafter cannot read the hidden states "
            "between them; choose another drafter"
        )

    def keep_input(number: int, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        tap.keep(number, (arguments[0] if arguments else options["hidden_states"])[0])

    def keep_output(_: nn.Module, __: Any, output: Any) -> None:
        tap.keep(num_layers, (output[0] if isinstance(output, tuple) else output)[0])

    for number in set(tap.layers) - {num_layers}:
        lists[0][number].register_forward_pre_hook(partial(keep_input, number), with_kwargs=True)
    lists[0][-1].register_forward_hook(keep_output)


@contextmanager
def computed_once(decoder: nn.Module) -> Iterator[None]:
    """Within the context, the decoder computes its first call; every further call returns that output.

    The caller passes the same step each time and changes only what the head computes (`logits_to_keep`).
    """
    # PyTorch calls the instance's `forward` before the class's. A hook is not enough, because it cannot skip the
    # computation.
    decoder.forward = _FirstOutput(decoder.forward)
    try:
        yield
    finally:
        del decoder.forward


class _FirstOutput:
    """A function that computes its first call and returns that output for every further one."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._output: Any = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._output is None:
            self._output = self._compute(*arguments, **options)
        return self._output


@torch.inference_mode()
def has_plain_head(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> bool:
    """Return whether the model's logits are what `head` gives for the decoder's hidden states, without scale or cap."""
    parameter = next(model.parameters())
    size = model.config.get_text_config().hidden_size
    # So large that a cap of the logits changes them.
    states = torch.linspace(-64.0, 64.0, size, dtype=parameter.dtype, device=parameter.device)[None, None]
    output = MoeModelOutputWithPast(last_hidden_state=states)
    decoder.forward = lambda *_, **__: output  # as in `computed_once`
    try:
        token = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
        logits = model(input_ids=token, position_ids=token, use_cache=False).logits
    finally:
        del decoder.forward
    return torch.equal(logits, head(states))


class LastHiddenStates:
    """Keeps the hidden states that a decoder returned last: what the output head reads."""

    def __init__(self, decoder: nn.Module) -> None:
        self._states: Tensor | None = None
        decoder.register_forward_hook(self._note)

    def take(self) -> Tensor:
        """Return [num_tokens, hidden_size] of the newest forward pass. May be called once for each."""
        states, self._states = self._states, None
        assert states is not None, "no forward pass since the last call"
        return states

    def _note(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._states = output.last_hidden_state[0]
