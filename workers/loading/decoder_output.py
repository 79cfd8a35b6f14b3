"""Find a model's decoder, keep what it computes, and run the model's output head again over it.

Output heads differ: some scale logits, some cap them, some have a bias. So servekit does not rebuild them. It runs the
model's own forward pass again, in which the decoder returns the hidden states that it computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


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


@contextmanager
def computed_once(decoder: nn.Module) -> Iterator[None]:
    """Within the context, the decoder computes its first call; every further call returns that output.

    The caller passes the same step each time and changes only what the head computes (`logits_to_keep`).
    """
    # PyTorch calls the instance's `forward` before the class's. A hook would not do: it cannot skip the computation.
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
