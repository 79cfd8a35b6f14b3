"""One stage of a pipeline: which layers it has, and what it exchanges with the other stages.

Hidden states go from each stage to the next. The token ids that the last stage samples go to the first one, which
embeds them in a later step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from servekit.errors import ConfigError


class PipelineStage:
    """Stage `index` of `size`."""

    def __init__(self, rank: int, num_ranks: int, size: int) -> None:
        """`rank` is this process's number among all ranks. Each stage has `num_ranks`.

        A rank sends to, and receives from, the ranks that have its own position in the other stages.
        """
        self.index, self.size = rank // num_ranks, size
        self.is_first, self.is_last = self.index == 0, self.index == size - 1
        self._next, self._previous = rank + num_ranks, rank - num_ranks
        self._first, self._last = rank % num_ranks, (size - 1) * num_ranks + rank % num_ranks
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()  # the tensors must be kept until they are sent
        # Of each step whose sampled tokens the first stage has not received: where they go. The oldest is first.
        self._expected: deque[Tensor] = deque()

    def layers_of(self, num_layers: int) -> range:
        """Return which of the model's layers this stage has. The first stages have one more if they are not equal."""
        if num_layers < self.size:
            raise ConfigError(
                f"{num_layers} layers cannot be divided into {self.size} stages (pipeline_parallel_size); choose at "
                f"most {num_layers}"
            )
        width, rest = divmod(num_layers, self.size)
        start = self.index * width + min(self.index, rest)
        return range(start, start + width + (self.index < rest))

    def send_on(self, hidden_states: Tensor) -> None:
        """Send hidden states to the next stage. Does not wait for it."""
        self._send(hidden_states, self._next)

    def receive(self, like: Tensor) -> Tensor:
        """Wait for hidden states of the previous stage, of this shape and dtype."""
        hidden_states = torch.empty_like(like)
        dist.recv(hidden_states, src=self._previous)
        return hidden_states

    def return_tokens(self, token_ids: Tensor) -> None:
        """Send the sampled token ids to the first stage. Does not wait for it.

        They go over the host. NCCL connects two GPUs when both call it for the first time, so the first stage would
        have to receive them at once.
        """
        self._send(token_ids.int().cpu(), self._first)

    def expect_tokens(self, cells: Tensor) -> None:
        """Note that a step was launched whose sampled tokens go to these cells of the token table."""
        self._expected.append(cells)

    def receive_tokens(self, table: Tensor) -> None:
        """Write to the token table what the next step may read: the tokens of all but the last `size - 1` steps.

        The manager plans a sequence's next token `size` steps later, so that this does not have to wait for long.
        """
        while len(self._expected) >= self.size:
            cells = self._expected.popleft()
            table.index_copy_(0, cells, self._receive_tokens(cells).to(table.device))

    def discard_tokens(self) -> None:
        """Receive the tokens of all steps so far, because their token table is no longer used."""
        while self._expected:
            self._receive_tokens(self._expected.popleft())

    def _receive_tokens(self, cells: Tensor) -> Tensor:
        token_ids = torch.empty(len(cells), dtype=torch.int32)
        if len(cells):  # else nothing is sent
            dist.recv(token_ids, src=self._last)
        return token_ids

    def _send(self, tensor: Tensor, target: int) -> None:
        # What is older than the steps in flight has arrived, so this does not wait. gloo notices it only in `wait`.
        while len(self._sending) > 2 * self.size:
            self._sending.popleft()[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=target)
        assert work is not None
        self._sending.append((work, tensor))


def keep_stage(model: Any, stage: PipelineStage) -> None:
    """Keep only this stage's modules in a model of transformers. A module of another stage returns its input unchanged.

    The model's own forward pass stays as it is. The layer before the stage's first one is replaced by one that receives
    hidden states from the previous stage. The layer after its last one is replaced by one that sends them to the next.
    Raises ConfigError for a model that transformers has no pipeline plan for.
    """
    decoder: Any = getattr(model, model.base_model_prefix, None)
    layers = getattr(decoder, "layers", None)
    has_plan = any(key.rpartition(".")[2] == "layers" for key in model.pp_plan or {})
    has_names = all(hasattr(decoder, name) for name in ("embed_tokens", "norm")) and hasattr(model, "lm_head")
    if not (has_plan and has_names and isinstance(layers, nn.ModuleList)):
        raise ConfigError(
            f"architecture {type(model).__name__} cannot be served with --pipeline-parallel-size {stage.size}: "
            "transformers has no plan that divides its layers into stages; use --pipeline-parallel-size 1"
        )
    own = stage.layers_of(len(layers))
    for index, layer in enumerate(layers):
        if index == own.start - 1:
            layers[index] = Receive(layer, stage)
        elif index == own.stop:
            layers[index] = SendOn(layer, stage)
        elif index not in own:
            layers[index] = PassOn(layer)
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    if not stage.is_first and not (stage.is_last and is_tied):
        decoder.embed_tokens = Zeros(decoder.embed_tokens)
    if not stage.is_last:
        decoder.norm, model.lm_head = PassOn(decoder.norm), PassOn(model.lm_head)
        model.all_tied_weights_keys = {}


class PassOn(nn.Module):
    """Stands for a part of the model that another stage computes: returns its input."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(replaced, "attention_type", None)  # which some models' loops read

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class Receive(PassOn):
    """Stands for the last layer of the previous stage: returns what that sent."""

    def __init__(self, replaced: nn.Module, stage: PipelineStage) -> None:
        super().__init__(replaced)
        self._stage = stage

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._stage.receive(hidden_states)


class SendOn(PassOn):
    """Stands for the first layer of the next stage: sends its input there."""

    def __init__(self, replaced: nn.Module, stage: PipelineStage) -> None:
        super().__init__(replaced)
        self._stage = stage

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self._stage.send_on(hidden_states)
        return hidden_states


class Zeros(nn.Module):
    """Stands for the embedding, which the first stage has: its shape is what counts."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self._size = embedding.embedding_dim
        self._dtype = embedding.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        return torch.zeros(*token_ids.shape, self._size, device=token_ids.device, dtype=self._dtype)
